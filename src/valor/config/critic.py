"""`critic`: the value model and its update."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from valor.config.actor import UpdateConfig
from valor.config.base import StepRanges, inherits, key, section, step_range
from valor.config.engine import FSDPConfig, OptimConfig
from valor.config.model import CriticModelConfig


class CriticOptimConfig(OptimConfig, lr=1e-5):
    """The critic's optimizer: ten times the actor's learning rate."""


class CriticFSDPConfig(
    FSDPConfig,
    model_dtype=inherits("actor_rollout_ref.actor.fsdp_config.model_dtype"),
    dtype=inherits("actor_rollout_ref.actor.fsdp_config.dtype"),
):
    """The critic's sharding; its precision follows the actor's."""


class CriticConfig(
    UpdateConfig,
    strategy=inherits("actor_rollout_ref.actor.strategy"),
    ppo_mini_batch_size=inherits("actor_rollout_ref.actor.ppo_mini_batch_size", ".freeze=false"),
    use_dynamic_bsz=inherits("actor_rollout_ref.actor.use_dynamic_bsz"),
    ppo_max_token_len_per_gpu=32768,
    ppo_epochs=inherits("actor_rollout_ref.actor.ppo_epochs", ".freeze=false"),
    shuffle=inherits("actor_rollout_ref.actor.shuffle"),
    loss_agg_mode=inherits("actor_rollout_ref.actor.loss_agg_mode"),
    loss_scale_factor=inherits("actor_rollout_ref.actor.loss_scale_factor"),
):
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
    model: CriticModelConfig = section(CriticModelConfig)
    value_loss: str = key("mse", ".freeze=false")
    """Name of a registered value loss: mse, huber, bce (returns from 0 to 1), hl_gauss (bins of values)."""
    value_loss_kwargs: dict[str, Any] = key({}, ".freeze=false")
    """Further options of that loss: huber_delta; hl_gauss: num_bins (51), value_min (0), value_max (1), sigma_bins."""
    cliprange_value: PositiveFloat | None = key(0.5, ".freeze=false")
    """Value clip range: new values are kept within this distance of the old ones in the loss; null never clips."""
    optim: CriticOptimConfig = section(CriticOptimConfig, ".freeze=false")
    fsdp_config: CriticFSDPConfig = section(CriticFSDPConfig)

    def contradictions(self, at: str) -> Iterator[str]:
        if self.ensemble_size > 1 and (self.freeze or self.model.value_head_init == "zero"):
            apart = f"{at}freeze=false" if self.freeze else f"{at}model.value_head_init=normal"
            yield f"{at}ensemble_size={self.ensemble_size}: the critics would all be the same, set {apart}"

    def frozen_at(self, step: int) -> bool:
        """Whether the critic is left alone in this step."""
        return self.freeze or any(step in step_range(steps) for steps in self.freeze_steps)
