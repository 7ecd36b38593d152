"""What tensor parallelism refuses; its numbers are compared in tests/integration/test_world_sizes.py."""

import pytest
from tiny_engine import CPU, tiny_policy
from transformers import AutoModelForCausalLM, CohereConfig, GPT2Config, MixtralConfig

from valor.config.engine import FSDPConfig
from valor.config.model import ModelConfig
from valor.engines.fsdp.engine import FSDPEngine
from valor.engines.fsdp.tensor_parallel import planned_styles
from valor.errors import UserError
from valor.models.lora import add_adapters
from valor.models.policy import PolicyModel

SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "intermediate_size": 48}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def policy(config) -> PolicyModel:
    return PolicyModel(AutoModelForCausalLM.from_config(config))


def with_adapters() -> PolicyModel:
    model = tiny_policy()
    add_adapters(model.hf, ModelConfig(path="x", lora_rank=2), base="x", seed=0)
    return model


@pytest.mark.parametrize(
    ("build", "size", "line"),
    [
        (tiny_policy, 2, "tensor_parallel_size=2 does not divide num_key_value_heads=1"),
        (tiny_policy, 3, "tensor_parallel_size=3 does not divide num_attention_heads=2"),
        (lambda: tiny_policy(num_key_value_heads=2, intermediate_size=33), 2, "does not divide intermediate_size=33"),
        (with_adapters, 2, "does not go with LoRA"),
        (lambda: policy(GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=61)), 2, "no tensor-parallel plan for G"),
        (lambda: policy(MixtralConfig(**SIZES, num_key_value_heads=2, **ENDS)), 2, "styles that are not available"),
        (
            lambda: policy(CohereConfig(**SIZES, num_key_value_heads=2, use_qk_norm=True, **ENDS)),
            2,
            "no rule for layers.0.self_attn.q_norm.weight",
        ),
    ],
    ids=["key-value heads", "heads", "columns", "adapters", "no plan", "experts", "norms that the plan forgot"],
)
def test_one_line_says_what_does_not_fit(build, size, line):
    with pytest.raises(UserError, match=line):
        planned_styles(build(), size)


@pytest.mark.usefixtures("alone")
def test_more_parts_than_processes():
    with pytest.raises(UserError, match="tensor_parallel_size=2 does not divide the 1 processes"):
        FSDPEngine(tiny_policy(), fsdp=FSDPConfig(tensor_parallel_size=2), optim=None, device=CPU)
