"""The native engine on a model with LoRA adapters."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from valor.config.engine import ModelConfig
from valor.data.batch import pad_rows
from valor.models import linear
from valor.models.load import load_policy
from valor.rollout.base import Request, SamplingParams
from valor.rollout.native import decoder
from valor.rollout.native.decoder import Product
from valor.rollout.native.engine import NativeEngine

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 61}


@pytest.fixture(params=[False, True], ids=["as a CPU", "as a GPU"])
def as_on_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether bfloat16 is multiplied as it is, without packed weights and compiled loops."""
    if request.param:
        monkeypatch.setattr(linear, "bfloat16_is_slow", lambda: False)
        monkeypatch.setattr(decoder, "_is_on_cpu", lambda weight: False)
    return request.param


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_samples_are_scored_as_training_scores_them(
    dtype: torch.dtype, tolerance: float, as_on_gpu: bool, tmp_path: Path
) -> None:
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
    engine = NativeEngine(policy.hf, eos_token_ids=[])
    outputs = engine.generate(requests)
    assert engine._direct, "the decoder drives it, not the model's own forward pass"

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bfloat16_weight_rounds_no_adapter_away(dtype: torch.dtype, as_on_gpu: bool) -> None:
    """Three layers as one product. What the adapters add to weights of 1 is less than half of what bfloat16 can tell
    apart there, and the inputs add up to 0, so that the answer is theirs alone."""
    from peft.tuners.lora import Linear, LoraConfig

    generator = torch.Generator().manual_seed(0)

    def layer(rank: int) -> torch.nn.Module:
        plain = torch.nn.Linear(64, 8, bias=False)
        plain.weight.data.fill_(1.0)
        if not rank:
            return plain.to(dtype)
        adapted = Linear(plain, "default", LoraConfig(r=rank), r=rank, lora_alpha=2 * rank)
        adapted.lora_A["default"].weight.data = torch.rand(rank, 64, generator=generator)
        adapted.lora_B["default"].weight.data = torch.rand(8, rank, generator=generator) * 2**-13
        return adapted.to(dtype)

    layers, x = [layer(4), layer(0), layer(2)], torch.ones(3, 64)
    x[:, 1::2] = -1.0
    with torch.inference_mode():
        product = Product(*layers)
        found = product(x.to(product.dtype)).double()
        first, last = (_update(one) @ x.double().t() for one in (layers[0], layers[2]))
    expected = torch.cat([first, torch.zeros(8, 3), last]).t()
    assert expected[:, :8].abs().min() > 0 < expected[:, 16:].abs().min()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2 * float(expected.abs().max()))


def _update(layer: torch.nn.Module) -> torch.Tensor:
    """2 B A, float64: alpha is twice the rank."""
    return 2.0 * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
