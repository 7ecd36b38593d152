"""Where a run's old log-probs come from, and the correction for samples drawn by another distribution.

Decoupled: π_old is recomputed before the first update, and the batch is corrected once for π_old / π_rollout.
Bypass: π_rollout itself is the old policy. What is corrected then is π_θ / π_rollout, which moves with every update:
each mini-batch is measured right before its update, so that the counts the loss divides by are those of the rejection
mask that it uses.
"""

from typing import Any

from torch import Tensor

from valor import algorithms
from valor.algorithms import ADVANTAGES
from valor.config import PPOConfig, RolloutCorrectionConfig
from valor.data.batch import Batch, Episodes

WEIGHTS = "rollout_is_weights"


class OldLogProbs:
    """The source of a run's old log-probs.

    bypass: those of the rollout. on_policy: a batch gets one update, so the current log-probs, detached, are the old
    ones. recompute: one pass over the batch before the first update. correct_batch, correct_mini_batches: when the
    rollout correction acts. corrects: samples of another distribution are corrected for, be it by the estimator.
    """

    def __init__(self, config: PPOConfig) -> None:
        correction, inputs = config.algorithm.rollout_correction, ADVANTAGES[config.algorithm.adv_estimator].parameters
        updates = config.updates_per_step(config.actor_rollout_ref.actor)
        acts = correction.weighs or correction.rollout_rs is not None
        reads = config.algorithm.use_kl_in_reward or config.distillation.as_reward or acts or "old_log_probs" in inputs
        reads |= config.trainer.v1.runs_ahead  # how far samples are off-policy is measured in any case
        self.bypass = correction.bypass_mode
        self.on_policy = updates == 1 and not self.bypass
        self.recompute = not self.bypass and (updates > 1 or reads)
        self.correct_batch, self.correct_mini_batches = acts and not self.bypass, acts and self.bypass
        self.corrects = acts or "rollout_log_probs" in inputs


def corrected(batch: Batch, log_probs: Tensor, config: RolloutCorrectionConfig) -> tuple[Batch, dict[str, float]]:
    """The batch with `rollout_is_weights` [B, T] (if asked for) and without rejected tokens in `response_mask`.

    `log_probs` [B, T] are the training model's. Metrics: `rollout_corr/*`.
    """
    episodes = Episodes(batch)  # a sequence is an episode, whatever its rows
    log_probs_of_rows = log_probs
    log_probs, rollout, mask = map(episodes.join, (log_probs, batch["rollout_log_probs"], batch["response_mask"]))
    columns = {"log_probs": log_probs, "rollout_log_probs": rollout, "response_mask": mask}
    correction = algorithms.rollout_correction(**columns, **correction_options(config))
    columns = {"response_mask": episodes.part(correction.response_mask)}
    if correction.weights is not None:
        columns[WEIGHTS] = episodes.part(correction.weights)
    metrics = {f"rollout_corr/{name}": value for name, value in correction.metrics.items()}
    return batch.union(Batch(columns)), off_policy(batch, log_probs_of_rows) | metrics


def off_policy(batch: Batch, log_probs: Tensor) -> dict[str, float]:
    """How far the batch's samples are from `log_probs` [B, T] of the training model: `rollout_corr/*`."""
    join = Episodes(batch).join
    columns = map(join, (log_probs, batch["rollout_log_probs"], batch["response_mask"]))
    return {f"rollout_corr/{name}": value for name, value in algorithms.off_policy_metrics(*columns).items()}


def correction_options(config: RolloutCorrectionConfig) -> dict[str, Any]:
    """Options of `algorithms.rollout_correction`."""
    options = config.model_dump(exclude={"bypass_mode", "loss_type"})
    return options if config.weighs else {**options, "rollout_is": None}
