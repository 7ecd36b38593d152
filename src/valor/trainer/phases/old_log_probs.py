"""Log-probs of the policy before the update: the rollout's, or those of one pass; and the correction between both."""

from valor.algorithms import ADVANTAGES
from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.models.rows import ROW_FIELDS
from valor.tracking.progress import phase
from valor.trainer.old_log_probs import WEIGHTS, OldLogProbs, corrected, off_policy
from valor.trainer.phases.base import Metrics, Phase
from valor.trainer.step_metrics import old_log_prob_metrics


def correction_plan(config: PPOConfig) -> str:
    """Weights and rejection that `algorithm.rollout_correction` asks for."""
    correction = config.algorithm.rollout_correction
    weights = [f"{correction.rollout_is} importance weights"] if correction.weighs else []
    rejection = [f"rejection by {correction.rollout_rs}"] if correction.rollout_rs is not None else []
    return ", ".join(weights + rejection)


class RolloutLogProbs(Phase):
    """The rollout's own are the old ones (bypass_mode)."""

    name = "rollout_as_old_log_probs"
    reads = frozenset(("rollout_log_probs",))
    adds = frozenset(("old_log_probs",))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return OldLogProbs.of(config).bypass

    def timing(self, batch: Batch, step: int) -> str | None:
        return None

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        return Batch({"old_log_probs": batch["rollout_log_probs"]}), {}


class RecomputedLogProbs(Phase):
    """One pass of the actor over the batch.

    A batch that gets one update needs none: the ratio is 1 then.
    """

    name = "old_log_prob"
    role = "actor"
    reads = frozenset(ROW_FIELDS)
    reads_if_there = frozenset(("episode",))

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        algorithm = config.algorithm
        self.sum_pi_squared = ADVANTAGES[algorithm.adv_estimator].capability.needs_sum_pi_squared
        self.full_kl = algorithm.exact_kl_in_reward
        more = ["sum_pi_squared"] * self.sum_pi_squared + ["full_kl"] * self.full_kl
        self.adds = frozenset(("old_log_probs", "entropy", *more))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return OldLogProbs.of(config).recompute

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        with phase("old log-probs", len(batch), unit="sample"):
            actor = self.resources.roles["actor"]
            return actor.compute_log_probs(
                batch, with_sum_pi_squared=self.sum_pi_squared, with_full_kl=self.full_kl
            ), {}


class OldLogProbMetrics(Phase):
    """Entropy, and the gap between rollout and training log-probs."""

    name = "old_log_prob_metrics"
    reads = frozenset(("response_mask", "response_lengths", "rollout_log_probs", "old_log_probs", "entropy"))
    reads_if_there = frozenset(("episode",))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return OldLogProbs.of(config).recompute

    def timing(self, batch: Batch, step: int) -> str | None:
        return "metrics"

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        metrics = old_log_prob_metrics(batch)
        if self.config.trainer.v1.runs_ahead and not OldLogProbs.of(self.config).correct_batch:
            metrics |= off_policy(batch, batch["old_log_probs"])
        return Batch(), metrics


class RolloutCorrection(Phase):
    """Importance weights and rejection for samples of another distribution."""

    name = "rollout_correction"
    reads = frozenset(("response_mask", "response_lengths", "rollout_log_probs", "old_log_probs"))
    reads_if_there = frozenset(("episode",))

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        weights = (WEIGHTS,) if config.algorithm.rollout_correction.weighs else ()
        self.adds = frozenset(("response_mask", *weights))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return OldLogProbs.of(config).correct_batch

    def plan(self) -> str:
        return correction_plan(self.config)

    def timing(self, batch: Batch, step: int) -> str | None:
        return "old_log_prob"

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        found, metrics = corrected(batch, batch["old_log_probs"], self.config.algorithm.rollout_correction)
        return found.select(self.adds), metrics
