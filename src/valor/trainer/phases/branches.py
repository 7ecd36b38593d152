"""Values by rollouts that branch off the responses (VinePPO, https://arxiv.org/abs/2410.01679)."""

from valor.collector.branches import add_branch_values
from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.trainer.phases.base import COLLECTED, EVERY_COLUMN, Metrics, Phase


class Branches(Phase):
    """Rollouts from states of each response; their mean return is the state's value."""

    name = "gen_branches"
    role = "rollout"
    reads = EVERY_COLUMN | COLLECTED
    adds = frozenset(("branch_mask", "branch_values"))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.algorithm.branch_values.share > 0

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        metrics = add_branch_values(self.resources.collector, batch, step)
        return batch.select(self.adds), metrics
