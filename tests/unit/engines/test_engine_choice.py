"""Which engine `strategy` names, and what is said where it cannot be had."""

import sys

import pytest
import torch

from valor.config import ActorConfig
from valor.config.engine import BackboneConfig
from valor.engines.registry import TRAINING_ENGINES
from valor.errors import UserError


def test_without_megatron_core_one_line_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "valor.engines.megatron.engine", raising=False)
    for name in {"megatron", *(name for name in sys.modules if name.startswith("megatron."))}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as caught:
        TRAINING_ENGINES["megatron"](ActorConfig(), BackboneConfig(), None, device=torch.device("cpu"))
    assert "is not installed: pip install 'valor-rl[megatron]'" in str(caught.value) and "\n" not in str(caught.value)
