"""What the native engine tells of itself."""

from typing import Any

import torch

from valor.config.ppo import PPOConfig
from valor.models.load import load_policy
from valor.rollout.native.engine import NativeCopy, NativeEngine
from valor.rollout.spec import BuildContext, GenerationEngineSpec


def _check(config: PPOConfig) -> list[str]:
    trained, dtype = config.actor_rollout_ref.actor.fsdp_config.dtype, config.actor_rollout_ref.rollout.dtype
    if dtype == trained or config.actor_rollout_ref.actor.strategy == "megatron":  # which it has a copy of
        return []
    return [
        f"actor_rollout_ref.rollout.dtype={dtype}, but rollout.name=native generates with the actor's own weights in "
        f"{trained}: set actor_rollout_ref.actor.fsdp_config.dtype"
    ]


def _plan(config: PPOConfig) -> str:
    apart = config.rollout_apart or config.actor_rollout_ref.actor.strategy == "megatron"
    return "own weights, synced every step" if apart else "shares the actor's weights"


def _build(context: BuildContext) -> NativeEngine:
    """With the actor's own parameters where they are in this process, whole; else with a copy of the model."""
    settings: dict[str, Any] = {"eos_token_ids": context.eos_token_ids, "max_num_seqs": context.config.max_num_seqs}
    settings |= {"images": context.images is not None, "records": context.records}
    actor = context.actor
    if actor is not None and actor.generation_module is not None:
        return NativeEngine(actor.generation_module, unsharded=actor.unsharded, **settings)
    base = context.model.model_copy(update={"lora_rank": 0, "lora_adapter_path": None})  # it is sent merged weights
    policy = load_policy(base, dtype=getattr(torch, context.config.dtype))
    return NativeCopy(policy.to(context.device), **settings)


NATIVE = GenerationEngineSpec(
    name="native",
    check=_check,
    plan=_plan,
    build=_build,
    weight_names="module",
    records=True,
)
