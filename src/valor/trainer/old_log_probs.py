"""Where a run's old log-probs come from, and the correction for samples drawn by another distribution.

Decoupled: π_old is recomputed before the first update, and the batch is corrected once for π_old / π_rollout.
Bypass: π_rollout itself is the old policy. What is corrected then is π_θ / π_rollout, which moves with every update:
each mini-batch is measured right before its update, so that the counts the loss divides by are those of the rejection
mask that it uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from valor import algorithms
from valor.config import PPOConfig, RolloutCorrectionConfig
from valor.data.batch import Batch, Episodes

WEIGHTS = "rollout_is_weights"


@dataclass(frozen=True)
class OldLogProbs:
    """The source of a run's old log-probs.

    bypass: those of the rollout. on_policy: a batch gets one update, so the current log-probs, detached, are the old
    ones. recompute: one pass over the batch before the first update. correct_batch, correct_mini_batches: when the
    rollout correction acts. by_estimator: the estimator weighs by rollout log-probs itself.
    """

    bypass: bool
    on_policy: bool
    recompute: bool
    correct_batch: bool
    correct_mini_batches: bool
    by_estimator: bool

    @staticmethod
    def of(config: PPOConfig) -> OldLogProbs:
        correction, actor = config.algorithm.rollout_correction, config.actor_rollout_ref.actor
        bypass = correction.bypass_mode
        updates = config.updates_per_step(actor)
        weighs, rejects = correction.weighs, correction.rollout_rs is not None
        names = algorithms.ADVANTAGES[config.algorithm.adv_estimator].parameters
        needed = config.algorithm.use_kl_in_reward or weighs or rejects or "old_log_probs" in names
        needed |= config.trainer.v1.runs_ahead  # how far samples are off-policy is measured in any case
        return OldLogProbs(
            bypass=bypass,
            on_policy=updates == 1 and not bypass,
            recompute=not bypass and (updates > 1 or needed),
            correct_batch=not bypass and (weighs or rejects),
            correct_mini_batches=bypass and (rejects or weighs),
            by_estimator="rollout_log_probs" in names,
        )

    @property
    def corrects(self) -> bool:
        """Whether samples of another distribution are corrected for."""
        return self.correct_batch or self.correct_mini_batches or self.by_estimator


def corrected(batch: Batch, log_probs: Tensor, config: RolloutCorrectionConfig) -> tuple[Batch, dict[str, float]]:
    """The batch with `rollout_is_weights` [B, T] (if asked for) and without rejected tokens in `response_mask`.

    `log_probs` [B, T] are the training model's. Metrics: `rollout_corr/*`.
    """
    episodes = Episodes(batch)  # a sequence is an episode, whatever its rows
    log_probs_of_rows = log_probs
    log_probs, rollout, mask = map(episodes.join, (log_probs, batch["rollout_log_probs"], batch["response_mask"]))
    correction = algorithms.rollout_correction(
        log_probs=log_probs,
        rollout_log_probs=rollout,
        response_mask=mask,
        rollout_is=config.rollout_is if config.weighs else None,
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_is_batch_normalize=config.rollout_is_batch_normalize,
        rollout_rs=config.rollout_rs,
        rollout_rs_threshold=config.rollout_rs_threshold,
    )
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
