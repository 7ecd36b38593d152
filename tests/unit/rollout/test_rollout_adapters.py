"""The native engine on a model with LoRA adapters."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from valor.config.engine import ModelConfig
from valor.data.batch import pad_rows
from valor.models.load import load_policy
from valor.rollout.base import Request, SamplingParams
from valor.rollout.native.engine import NativeEngine

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 61}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_samples_are_scored_as_training_scores_them(dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, num_attention_heads=2, num_key_value_heads=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(path=str(tmp_path), lora_rank=4), dtype=dtype)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3)
    policy.to(dtype)  # as the engine gathers them
    before = {name: value.clone() for name, value in policy.state_dict().items()}

    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    requests = [Request(str(i), p, SamplingParams(max_tokens=6), (0, 0, i)) for i, p in enumerate(prompts)]
    outputs = NativeEngine(policy.hf, eos_token_ids=[]).generate(requests)

    ids, lengths = pad_rows(prompts, torch.long)
    responses, response_lengths = pad_rows([o.token_ids for o in outputs], torch.long)
    rows = {"prompts": ids, "prompt_lengths": lengths, "responses": responses, "response_lengths": response_lengths}
    scored, _ = pad_rows([o.log_probs for o in outputs], torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(policy(rows)["log_probs"], scored, rtol=0, atol=tolerance)
        base = load_policy(ModelConfig(path=str(tmp_path)), dtype=dtype)(rows)["log_probs"]
    assert (base - scored).abs().max() > 0.1
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert not any("forward" in module.__dict__ for module in policy.hf.modules())
