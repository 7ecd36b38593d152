"""Which episodes critic and actor learn from: those that have a reward and, if so set, their end."""

import torch

from valor.config import PPOConfig
from valor.data.batch import Batch, Episodes
from valor.trainer.advantage import CUT_OFF
from valor.trainer.phases.base import Metrics, Phase

CHOSEN = "trained_episodes"  # in a batch's meta: numbers of episodes, repetition allowed; absent: all


def trained(batch: Batch) -> Batch:
    """The rows that critic and actor learn from."""
    chosen = batch.meta.get(CHOSEN)
    return batch if chosen is None else Episodes(batch).take(chosen)


class TrainingRows(Phase):
    """Leaves out episodes without a reward (missing_reward=exclude), and cut off ones (truncated_responses=exclude)."""

    name = "training_rows"
    timer = "adv"
    reads = frozenset(("response_mask", "response_lengths", "finish_reason"))
    reads_if_there = frozenset(("episode", "reward_missing"))
    adds = frozenset((CHOSEN,))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.algorithm.leaves_out_episodes

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        ends = [rows[-1] for rows in Episodes(batch).rows]
        reasons, missing = batch.objects["finish_reason"], torch.zeros(len(batch), dtype=torch.bool)
        if self.config.algorithm.missing_reward == "exclude" and "reward_missing" in batch:
            missing = batch["reward_missing"]
        cut_off = CUT_OFF if self.config.algorithm.truncated_responses == "exclude" else ()
        chosen = [number for number, row in enumerate(ends) if not missing[row] and reasons[row] not in cut_off]
        return Batch(meta={CHOSEN: chosen}), {"training/left_out_ratio": 1 - len(chosen) / len(ends)}
