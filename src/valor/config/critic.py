"""`critic`: the value model and its update."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from valor.config.actor import LossAggMode
from valor.config.base import DType, Section, StepRanges, inherits, key, section, step_range
from valor.config.engine import CheckpointConfig, FSDPConfig, OptimConfig, Strategy
from valor.config.model import CriticModelConfig


class CriticOptimConfig(OptimConfig):
    """The critic's optimizer: ten times the actor's learning rate."""

    lr: NonNegativeFloat = 1e-5
    """Peak learning rate."""


class CriticFSDPConfig(FSDPConfig):
    """The critic's sharding; its precision follows the actor's."""

    model_dtype: DType = inherits("actor_rollout_ref.actor.fsdp_config.model_dtype")
    """Precision in which parameters and optimizer state are kept; gradients are summed in float32."""
    dtype: DType = inherits("actor_rollout_ref.actor.fsdp_config.dtype")
    """Precision of the forward and backward pass."""


class CriticConfig(Section):
    """The value model's update."""

    enable: bool = key(True, derived="true with gae")
    """Train a critic; null leaves it to algorithm.adv_estimator."""
    freeze: bool = False
    """Use the critic as it was loaded: no gradients, no optimizer."""
    freeze_steps: StepRanges = key([], ".freeze=false")
    """Steps in which the critic is not trained, such as 1-50 or [10-20,80-] (the second without an end)."""
    ensemble_size: PositiveInt = 1
    """Critics, each with a head and an order of the mini-batches of its own."""
    ensemble_reduce: Literal["mean", "min"] = key("mean", ".ensemble_size!=1")
    """Value of an ensemble: the mean of its critics', or the smallest."""
    strategy: Strategy = inherits("actor_rollout_ref.actor.strategy")
    """Training engine: fsdp2."""
    model: CriticModelConfig = section(CriticModelConfig)
    ppo_mini_batch_size: PositiveInt = inherits("actor_rollout_ref.actor.ppo_mini_batch_size", ".freeze=false")
    """PROMPTS per optimizer step (times rollout.n samples)."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Most samples in a micro-batch of one process; null leaves it to the token budget."""
    use_dynamic_bsz: bool = inherits("actor_rollout_ref.actor.use_dynamic_bsz")
    """true: form micro-batches by tokens alone, whatever ppo_micro_batch_size_per_gpu says."""
    ppo_max_token_len_per_gpu: PositiveInt = 32768
    """Most tokens (padding included) in a micro-batch of one process; one longer sample goes alone."""
    ppo_epochs: PositiveInt = inherits("actor_rollout_ref.actor.ppo_epochs", ".freeze=false")
    """Passes over each training batch."""
    shuffle: bool = inherits("actor_rollout_ref.actor.shuffle")
    """Draw mini-batches in random order."""
    data_loader_seed: int = inherits("trainer.seed")
    """Seed of that order."""
    value_loss: str = key("mse", ".freeze=false")
    """Name of a registered value loss: mse, huber, bce (returns from 0 to 1), hl_gauss (bins of values)."""
    value_loss_kwargs: dict[str, Any] = key({}, ".freeze=false")
    """Further options of that loss: huber_delta; hl_gauss: num_bins (51), value_min (0), value_max (1), sigma_bins."""
    cliprange_value: PositiveFloat | None = key(0.5, ".freeze=false")
    """Value clip range: new values are kept within this distance of the old ones in the loss; null never clips."""
    loss_agg_mode: LossAggMode = inherits("actor_rollout_ref.actor.loss_agg_mode")
    """How token losses become one number; denominators count the whole mini-batch."""
    loss_scale_factor: PositiveFloat = inherits("actor_rollout_ref.actor.loss_scale_factor")
    """seq-mean-token-sum-norm: divisor of each sequence's sum."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Processes that share their rows, each a part of every row (Ulysses); must divide the attention heads."""
    optim: CriticOptimConfig = section(CriticOptimConfig, ".freeze=false")
    fsdp_config: CriticFSDPConfig = section(CriticFSDPConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)

    @property
    def max_rows(self) -> int | None:
        """Upper bound on the rows of a micro-batch; None when tokens alone decide."""
        return None if self.use_dynamic_bsz else self.ppo_micro_batch_size_per_gpu

    def contradictions(self, at: str) -> list[str]:
        if self.ensemble_size == 1 or not (self.freeze or self.model.value_head_init == "zero"):
            return []
        apart = f"{at}freeze=false" if self.freeze else f"{at}model.value_head_init=normal"
        return [f"{at}ensemble_size={self.ensemble_size}: the critics would all be the same, set {apart}"]

    def frozen_at(self, step: int) -> bool:
        """Whether the critic is left alone in this step."""
        return self.freeze or any(step in step_range(steps) for steps in self.freeze_steps)
