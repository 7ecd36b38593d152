"""Log-probs of the policy before the update: the rollout's, or those of one pass; and the correction between both."""

from collections.abc import Iterator
from typing import Any

import torch

from valor import algorithms
from valor.algorithms import ADVANTAGES
from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.models.routing import ROUTES
from valor.models.rows import ROW_FIELDS
from valor.tracking.progress import phase
from valor.trainer.old_log_probs import WEIGHTS, OldLogProbs, corrected, correction_options, off_policy
from valor.trainer.phases.base import Metrics, Phase


class RolloutLogProbs(Phase):
    """The rollout's log-probs are the old ones (bypass_mode)."""

    name = "rollout_as_old_log_probs"
    reads = frozenset(("rollout_log_probs",))
    adds = frozenset(("old_log_probs",))
    timer = "metrics"  # no pass

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return OldLogProbs(config).bypass

    @classmethod
    def contradictions(cls, config: PPOConfig) -> Iterator[str]:
        return _try_correction(config)

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        return Batch({"old_log_probs": batch["rollout_log_probs"]}), {}


class RecomputedLogProbs(Phase):
    """One pass of the actor over the batch."""

    name = "old_log_prob"
    role = "actor"
    reads = frozenset(ROW_FIELDS)
    reads_if_there = frozenset(("episode", ROUTES))

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        capability = ADVANTAGES[config.algorithm.adv_estimator].capability
        self.extras = {
            "sum_pi_squared": capability.needs_sum_pi_squared,
            "full_kl": config.algorithm.exact_kl_in_reward,
        }
        self.adds = frozenset(("old_log_probs", "entropy", *(name for name, on in self.extras.items() if on)))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return OldLogProbs(config).recompute

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        with phase("old log-probs", len(batch), unit="sample"):
            options = {f"with_{name}": on for name, on in self.extras.items()}
            return self.resources.roles["actor"].compute_log_probs(batch, **options), {}


class OldLogProbMetrics(Phase):
    """Entropy, and the gap between rollout and training log-probs."""

    name = "old_log_prob_metrics"
    timer = "metrics"
    reads = frozenset(("response_mask", "response_lengths", "rollout_log_probs", "old_log_probs", "entropy"))
    reads_if_there = frozenset(("episode",))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return OldLogProbs(config).recompute

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        mask, old = batch["response_mask"], batch["old_log_probs"]
        count = max(float(mask.sum()), 1.0)
        gaps = algorithms.mismatch_sums(old, batch["rollout_log_probs"], mask, count)
        metrics: Metrics = {"actor/entropy": float((batch["entropy"] * mask).sum() / count)}
        metrics |= {name: gap.item() for name, gap in gaps.items()}
        if self.config.trainer.v1.runs_ahead and not OldLogProbs(self.config).correct_batch:
            metrics |= off_policy(batch, old)
        return Batch(), metrics


class RolloutCorrection(Phase):
    """Importance weights and rejection for samples of another distribution."""

    name = "rollout_correction"
    timer = "old_log_prob"
    reads = frozenset(("response_mask", "response_lengths", "rollout_log_probs", "old_log_probs"))
    reads_if_there = frozenset(("episode",))

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        weights = (WEIGHTS,) if config.algorithm.rollout_correction.weighs else ()
        self.adds = frozenset(("response_mask", *weights))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return OldLogProbs(config).correct_batch

    @classmethod
    def contradictions(cls, config: PPOConfig) -> Iterator[str]:
        return _try_correction(config)

    def plan(self) -> str:
        return correction_plan(self.config)

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        result, metrics = corrected(batch, batch["old_log_probs"], self.config.algorithm.rollout_correction)
        return result.select(self.adds), metrics


def correction_plan(config: PPOConfig) -> str:
    """Weights and rejection of `algorithm.rollout_correction`, in words."""
    correction = config.algorithm.rollout_correction
    weights = [f"{correction.rollout_is} importance weights"] if correction.weighs else []
    rejection = [f"rejection by {correction.rollout_rs}"] if correction.rollout_rs is not None else []
    return ", ".join(weights + rejection)


def _try_correction(config: PPOConfig) -> Iterator[str]:
    """Uses the settings on one token. UserError: they are wrong."""
    x, correction = torch.ones(1, 1), config.algorithm.rollout_correction
    options: dict[str, Any] = correction_options(correction) | {"rollout_is": correction.rollout_is}
    algorithms.rollout_correction(log_probs=-x, rollout_log_probs=-x, response_mask=x, **options)
    yield from ()
