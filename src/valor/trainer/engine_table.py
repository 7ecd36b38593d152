"""Generation engines by name (until rollout/registry.py holds them)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from valor.algorithms.registry import choose
from valor.config import PPOConfig
from valor.models.load import load_model_config
from valor.rollout.vllm_options import check_vllm

_KEY = "actor_rollout_ref.rollout"
_VLLM = (
    *("gpu_memory_utilization", "tensor_model_parallel_size", "max_num_batched_tokens", "enforce_eager"),
    *("cudagraph_capture_sizes", "free_cache_engine", "enable_chunked_prefill", "enable_prefix_caching"),
    *("load_format", "disable_log_stats", "engine_kwargs.vllm*", "max_model_len"),
)


@dataclass(frozen=True)
class GenerationEngineSpec:
    name: str
    reads: tuple[str, ...]
    check: Callable[[PPOConfig], list[str]]
    check_start: Callable[[PPOConfig, int], None]
    plan: Callable[[PPOConfig], str]


def _check_native(config: PPOConfig) -> list[str]:
    trained, dtype = config.actor_rollout_ref.actor.fsdp_config.dtype, config.actor_rollout_ref.rollout.dtype
    if dtype == trained:
        return []
    return [
        f"{_KEY}.dtype={dtype}, but rollout.name=native generates with the actor's own weights in {trained}: set "
        "actor_rollout_ref.actor.fsdp_config.dtype"
    ]


def _check_server(config: PPOConfig) -> list[str]:
    lines, rollout = [], config.actor_rollout_ref.rollout
    if not rollout.server.base_url:
        lines.append(
            f"{_KEY}.name=server asks a server that is running: set {_KEY}.server.base_url, such as "
            "http://localhost:8000/v1"
        )
    if config.rollout_apart:
        lines.append(
            f"{_KEY}.name=server generates on the server's devices: drop {_KEY}.nnodes, and rollout in resource_pools"
        )
    if rollout.temperature != 1 and (rollout.top_k > 0 or rollout.top_p < 1):
        lines.append(
            f"{_KEY}.name=server: no server tells log-probs at temperature {rollout.temperature:g} before {_KEY}.top_k "
            "and top_p cut: drop them, or set temperature=1, or take name=vllm"
        )
    return lines


def _check_vllm_start(config: PPOConfig, world_size: int) -> None:
    shared = config.actor_rollout_ref
    check_vllm(shared.rollout, load_model_config(shared.model), world_size)


def _plan_native(config: PPOConfig) -> str:
    shared = config.actor_rollout_ref.actor.fsdp_config.tensor_parallel_size == 1 and not config.rollout_apart
    return "shares the actor's weights" if shared else "own weights, synced every step"


def _plan_server(config: PPOConfig) -> str:
    rollout = config.actor_rollout_ref.rollout
    how = "which keeps its weights" if rollout.keeps_weights else "synced every step"
    return f"{', '.join(rollout.server.base_url)}, {how}"


_ENGINES = (
    GenerationEngineSpec("native", ("max_model_len",), _check_native, lambda *_: None, _plan_native),
    GenerationEngineSpec("vllm", _VLLM, lambda _: [], _check_vllm_start, lambda _: "own weights, synced every step"),
    GenerationEngineSpec("server", ("server.*",), _check_server, lambda *_: None, _plan_server),
)


def generation_engines() -> tuple[GenerationEngineSpec, ...]:
    return _ENGINES


def generation_engine(name: str) -> GenerationEngineSpec:
    known = {engine.name: engine for engine in _ENGINES}
    return known[choose(name, known, "actor_rollout_ref.rollout.name")]
