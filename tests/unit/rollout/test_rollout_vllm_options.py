"""What can be said about a vLLM configuration without vLLM."""

import importlib.util

import pytest
import torch
from transformers import Qwen2Config

from valor.config import ModelConfig, RolloutConfig, load
from valor.errors import UserError
from valor.rollout.vllm.options import VLLM, check_vllm, engine_options

HF = Qwen2Config(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=2, hidden_size=64)


def rollout(**settings: object) -> RolloutConfig:
    return RolloutConfig(**({"name": "vllm", "max_model_len": 30, "dtype": "float32"} | settings))


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_vllm_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed: pip install 'valor-rl\[vllm\]'"):
        check_vllm(rollout(), HF, 1)


@pytest.mark.parametrize(
    ("size", "world_size", "words"),
    [
        (3, 3, "8 attention heads"),
        (8, 8, "4 key-value heads"),
        (4, 2, "do not fit the 2"),
        (2, 3, "the 3 that generate"),
    ],
)
def test_tensor_parallelism_that_does_not_fit(size, world_size, words, installed):
    with pytest.raises(UserError, match=words):
        check_vllm(rollout(tensor_model_parallel_size=size), HF, world_size)


def test_tensor_parallelism_that_fits(installed):
    for size, world_size in ((1, 3), (2, 2), (4, 8)):
        check_vllm(rollout(tensor_model_parallel_size=size), HF, world_size)


def test_keys_become_engine_arguments():
    config = rollout(
        gpu_memory_utilization=0.7,
        tensor_model_parallel_size=2,
        max_num_seqs=7,
        engine_kwargs={"vllm": {"swap_space": 3, "max_num_seqs": 8, "load_format": "auto"}},
    )
    model = ModelConfig(path="m", override_config={"rope_theta": 5.0, "attn_implementation": "eager"})
    found = engine_options(config, model, HF, torch.device("cuda", 0), world_size=2)
    expected = {
        "model": "m",
        "hf_overrides": {"rope_theta": 5.0},
        "dtype": "float32",
        "max_model_len": 30,
        "gpu_memory_utilization": 0.7,
        "tensor_parallel_size": 2,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": True,
        "load_format": "auto",
        "enable_sleep_mode": True,
        "moe_backend": "triton",
        "swap_space": 3,
    }
    assert found | expected == found


def test_a_cpu_has_no_graphs_no_sleep_and_a_cache_of_the_size_that_is_needed():
    config = rollout(max_num_seqs=7, engine_kwargs={"vllm": {"enforce_eager": False}})
    found = engine_options(config, ModelConfig(), HF, torch.device("cpu"), world_size=1)
    assert found["enforce_eager"] and not found["enable_sleep_mode"]
    # keys and values, 2 layers, 4 heads of 8, 4 bytes; 8 sequences of one block of 32 tokens (30 used)
    assert found["kv_cache_memory_bytes"] == 2 * 2 * 4 * 8 * 4 * 8 * 32
    small = rollout(max_num_seqs=10**9, gpu_memory_utilization=0.001)
    found = engine_options(small, ModelConfig(), HF, torch.device("cpu"), world_size=2)
    assert 10**6 < found["kv_cache_memory_bytes"] < 10**9


def test_the_plan_says_what_it_takes_of_a_gpu_and_when_it_is_loaded():
    asked = ["data.train_files=x", "actor_rollout_ref.model.path=x", "actor_rollout_ref.rollout.name=vllm"]
    said = VLLM.plan(load([*asked, "actor_rollout_ref.rollout.gpu_memory_utilization=0.4"]).config)
    assert "up to 40% of its memory" in said and "sleeps in between" in said and "after the actor and before" in said
    said = VLLM.plan(load([*asked, "actor_rollout_ref.rollout.nnodes=1"]).config)
    assert "before the other roles" not in said
