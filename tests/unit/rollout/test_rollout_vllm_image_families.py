"""Models of which vLLM is not known to read images as the policy does are refused before a run."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tiny_vision import make_model
from valor.config import PPOConfig, load
from valor.errors import UserError
from valor.rollout.registry import GENERATION_ENGINES


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_other_families_are_refused(tmp_path: Path) -> None:
    for family in ("internvl", "qwen2_5_vl"):
        model = make_model(tmp_path / family, family)
        keys = [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=vllm", "data.image_key=images"]
        config = load(keys, PPOConfig).config
        if family == "qwen2_5_vl":
            GENERATION_ENGINES["vllm"].check_start(config, 1)
            continue
        with pytest.raises(UserError, match=r"of type qwen2_vl, qwen2_5_vl, .* is a internvl: set"):
            GENERATION_ENGINES["vllm"].check_start(config, 1)
