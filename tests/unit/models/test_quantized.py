"""Checkpoints of quantized weights: read as floats, and exported, sent and read again as these."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from valor.config.engine import CriticModelConfig, ModelConfig
from valor.errors import UserError
from valor.models.export import export_hf, published_weights
from valor.models.load import load_policy, load_value_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
EXPERTS = {**SIZES, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
OSS = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "fp8": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "fp8 of experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**EXPERTS)),
    "mxfp4": (GptOssForCausalLM, GptOssConfig(**OSS)),
}


def fp8(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    out = dict(weights)
    for name, weight in weights.items():
        if weight.ndim == 2 and "proj" in name:
            scale, blocks = weight.abs().max() / 448, [size // 32 for size in weight.shape]
            out[name], out[f"{name}_scale_inv"] = (weight / scale).to(torch.float8_e4m3fn), scale.repeat(blocks)
    return out


def mxfp4(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random blocks of two numbers a byte, in place of the experts."""
    experts = {name: weight.shape for name, weight in weights.items() if name.endswith("_proj")}
    out = {name: weight for name, weight in weights.items() if name not in experts}
    for name, (number, inputs, outputs) in experts.items():
        out[f"{name}_blocks"] = torch.randint(0, 256, (number, outputs, inputs // 32, 16), dtype=torch.uint8)
        out[f"{name}_scales"] = torch.full((number, outputs, inputs // 32), 122, dtype=torch.uint8)
    return out


def quantized(path: Path, method: str) -> dict[str, Tensor]:
    """Write such a checkpoint; the weights before they were quantized."""
    kind, config = MODELS[method]
    torch.manual_seed(0)
    kind(config).save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    name = method.split()[0]
    save_file({"fp8": fp8, "mxfp4": mxfp4}[name](weights), path / "model.safetensors", {"format": "pt"})
    settings = {"fp8": {"weight_block_size": [32, 32], "activation_scheme": "dynamic"}, "mxfp4": {}}[name]
    set_quantization(path, {"quant_method": name, **settings})
    return weights


def set_quantization(path: Path, settings: dict) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


@pytest.mark.parametrize("method", MODELS)
def test_what_was_read_as_floats_is_exported_and_sent_as_floats(method: str, tmp_path: Path) -> None:
    before, ids = quantized(tmp_path / "model", method), torch.arange(2, 16)[None]
    policy = load_policy(ModelConfig(path=str(tmp_path / "model")))
    if method.startswith("fp8"):
        read = dict(published_weights(policy, policy.state_dict().items()))
        assert all((read[name] - weight).abs().max() <= weight.abs().max() / 16 for name, weight in before.items())
    export_hf(policy, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == before.keys() and {weight.dtype for weight in written.values()} == {torch.float32}
    sent = dict(published_weights(policy, policy.state_dict().items()))
    assert sent.keys() == before.keys() and all(torch.equal(sent[name], written[name]) for name in sent)
    again = load_policy(ModelConfig(path=str(tmp_path / "out")))
    assert torch.equal(policy.hf(input_ids=ids).logits, again.hf(input_ids=ids).logits)


def test_a_critic_of_a_quantized_model_is_exported_as_floats(tmp_path: Path) -> None:
    quantized(tmp_path / "model", "fp8")
    export_hf(load_value_model(CriticModelConfig(path=str(tmp_path / "model"))), tmp_path / "out")
    assert {x.dtype for x in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "modelopt"])
def test_layers_that_are_not_trained_are_refused(method: str, tmp_path: Path) -> None:
    quantized(tmp_path, "fp8")
    set_quantization(tmp_path, {"quant_method": method, "load_in_4bit": True})
    with pytest.raises(UserError, match=rf"is quantized \({method}\), and full weights are trained: take"):
        load_policy(ModelConfig(path=str(tmp_path)))
