"""What a step's batch shows, and its samples in the run's folder: nothing waits for these."""

from valor.data.batch import Batch, Episodes
from valor.trainer.phases.base import COLLECTED, EVERY_COLUMN, Metrics, Phase
from valor.trainer.step_metrics import baseline_metrics, batch_metrics, critic_diagnostics


class BatchMetrics(Phase):
    """Scores, rewards, advantages, values and lengths of the whole batch, and how good the critic is."""

    name = "metrics"
    reads = frozenset(("response_mask", "response_lengths", "prompt_lengths", "token_level_scores", "finish_reason"))
    reads = reads | {"uid", "token_level_rewards", "advantages", "returns"}
    reads_if_there = frozenset(("episode", "turn_ids", "values", "value_mask", "reward_missing"))

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        joined = Episodes(batch).joined()
        if self.config.algorithm.missing_reward == "exclude" and "reward_missing" in joined:
            left_out = joined["reward_missing"][:, None]  # they have neither return nor advantage
            masks = [name for name in ("response_mask", "value_mask") if name in joined]
            joined = joined.union(Batch({name: joined[name].masked_fill(left_out, 0.0) for name in masks}))
        metrics = {**batch_metrics(joined), **critic_diagnostics(joined, self.config)}
        if "values" in joined and self.config.algorithm.reward_source != "critic":
            metrics |= baseline_metrics(joined, self.config.algorithm.gamma)
        return Batch(), metrics


class Samples(Phase):
    """The first episodes of the batch, token by token, for the report and the files of rollouts."""

    name = "samples"
    reads = EVERY_COLUMN | COLLECTED

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        self.resources.record.samples(step, batch)
        return Batch(), {}
