"""Sections shared by every role that trains: sharding and precision, optimizer, checkpoint contents."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat

from valor.config.base import CountOrOff, DType, Section, Share, inherits, key

Part = Literal["model", "optimizer", "extra", "hf_model"]
RESUMABLE = ["model", "optimizer", "extra"]


def _resumable(parts: list[str]) -> list[str]:
    if not set(RESUMABLE) <= set(parts):
        raise ValueError("list model, optimizer and extra, so that a run resumes exactly")
    return parts


class FSDPConfig(Section):
    """How a model is sharded, in which precision it computes, and what is moved to the host between phases."""

    param_offload: bool = False
    """Keep parameters in host memory while the role is idle."""
    optimizer_offload: bool = False
    """Keep optimizer state in host memory while the role is idle."""
    offload_policy: bool = key(False, "trainer.device!=cpu")
    """Parameters, gradients and optimizer state live in host memory also while computing (CUDA)."""
    reshard_after_forward: bool | None = None
    """Save memory, send more: free layers after each use, reduce gradients every micro-batch. null: true on GPUs."""
    fsdp_size: int = -1
    """Processes per shard group; the groups hold copies of each other. -1 is one group."""
    forward_prefetch: bool = False
    """Gather the next layer's parameters while the present one computes."""
    model_dtype: DType = "float32"
    """Precision in which parameters and optimizer state are kept; gradients are summed in float32."""
    dtype: DType = "bfloat16"
    """Precision of the forward and backward pass."""


class FollowerFSDPConfig(
    FSDPConfig,
    model_dtype=inherits("actor_rollout_ref.actor.fsdp_config.model_dtype"),
    dtype=inherits("actor_rollout_ref.actor.fsdp_config.dtype"),
):
    """How a model beside the actor is sharded; in the actor's precision, so that the reference's KL starts at zero."""


DecayRate = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW (torch.optim's, fused), gradient clipping, and the learning rate, which changes once a training step."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Denominator offset."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    clip_grad: PositiveFloat | None = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. null never scales."""
    lr_warmup_steps: CountOrOff = -1
    """Linear warm-up steps (the last one has the full rate); -1 takes lr_warmup_steps_ratio of the run."""
    lr_warmup_steps_ratio: Share = key(0.0, ".lr_warmup_steps=-1")
    """Warm-up as a share of all training steps, used when lr_warmup_steps is -1."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after warm-up."""
    min_lr_ratio: Share = key(0.0, ".lr_scheduler_type!=constant")
    """Floor of the cosine and linear schedules as a share of lr."""
    num_cycles: PositiveFloat = key(0.5, ".lr_scheduler_type=cosine")
    """Cosine periods over the run; 0.5 falls once from lr to the floor."""


class FastOptimConfig(OptimConfig, lr=1e-5):
    """The optimizer of a critic and of supervised training: ten times the actor's learning rate."""


class CheckpointConfig(Section):
    """What a role writes into a checkpoint and reads back."""

    save_contents: Annotated[list[Part], AfterValidator(_resumable)] = key(RESUMABLE)
    """Parts to write; hf_model adds a plain Hugging Face directory to every checkpoint."""
