"""Fixtures of the rollout tests."""

from collections.abc import Iterator

import pytest
import torch
from rollout_models import random_model
from transformers import PreTrainedModel


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def qwen() -> PreTrainedModel:
    return random_model("qwen2")
