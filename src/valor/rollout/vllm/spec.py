"""What the vLLM engine tells of itself; vLLM is imported when an engine is built, which takes ten seconds."""

from __future__ import annotations

from valor.config.ppo import PPOConfig
from valor.rollout.base import RolloutEngine
from valor.rollout.spec import BuildContext, GenerationEngineSpec

_READS = (
    *("gpu_memory_utilization", "tensor_model_parallel_size", "data_parallel_size", "expert_parallel_size"),
    *("pipeline_model_parallel_size", "max_model_len", "max_num_batched_tokens", "enforce_eager"),
    *("cudagraph_capture_sizes", "free_cache_engine", "enable_chunked_prefill", "enable_prefix_caching"),
    *("load_format", "disable_log_stats", "engine_kwargs.vllm*"),
)


def _check(config: PPOConfig) -> list[str]:
    rollout = config.actor_rollout_ref.rollout
    return [
        f"actor_rollout_ref.rollout.{key}={getattr(rollout, key)} is not available: set it to 1 (replicas follow from "
        "the processes and tensor_model_parallel_size)"
        for key in ("data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size")
        if getattr(rollout, key) > 1
    ]


def _check_start(config: PPOConfig, world_size: int) -> None:
    from valor.models.load import load_model_config
    from valor.rollout.vllm.options import check_vllm

    shared = config.actor_rollout_ref
    check_vllm(shared.rollout, load_model_config(shared.model), world_size)


def _build(context: BuildContext) -> RolloutEngine:
    from valor.models.load import load_model_config
    from valor.rollout.vllm.engine import VLLMEngine

    return VLLMEngine(
        context.config,
        context.model,
        load_model_config(context.model),
        eos_token_ids=context.eos_token_ids,
        device=context.device,
    )


VLLM = GenerationEngineSpec(
    name="vllm",
    reads=_READS,
    check=_check,
    check_start=_check_start,
    plan=lambda config: "own weights, synced every step",
    build=_build,
)
