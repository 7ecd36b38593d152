"""Which episodes critic and actor learn from: those that have a reward."""

from valor.config import PPOConfig
from valor.data.batch import Batch, Episodes
from valor.trainer.phases.base import Metrics, Phase

CHOSEN = "trained_episodes"  # in a batch's meta: numbers of episodes, repetition allowed; absent: all


def trained(batch: Batch) -> Batch:
    """The rows that critic and actor learn from."""
    chosen = batch.meta.get(CHOSEN)
    return batch if chosen is None else Episodes(batch).take(chosen)


class TrainingRows(Phase):
    """Leaves out episodes without a reward (missing_reward=exclude)."""

    name = "training_rows"
    timer = "adv"
    reads = frozenset(("response_mask", "response_lengths", "reward_missing"))
    reads_if_there = frozenset(("episode",))
    adds = frozenset((CHOSEN,))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.algorithm.reward_mask_ratio > 0 and config.algorithm.missing_reward == "exclude"

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        missing = batch["reward_missing"].tolist()
        chosen = [number for number, rows in enumerate(Episodes(batch).rows) if not missing[rows[0]]]
        return Batch(meta={CHOSEN: chosen}), {}
