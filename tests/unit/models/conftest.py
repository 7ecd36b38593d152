"""Rows that the model tests share."""

import pytest
import torch
from tiny_models import VOCAB


@pytest.fixture
def rows() -> dict[str, torch.Tensor]:
    """Four ragged rows; one response is empty, one fills the grid."""
    torch.manual_seed(1)
    return {
        "prompts": torch.randint(3, VOCAB, (4, 6)),
        "prompt_lengths": torch.tensor([6, 2, 3, 1]),
        "responses": torch.randint(3, VOCAB, (4, 7)),
        "response_lengths": torch.tensor([4, 7, 0, 5]),
    }
