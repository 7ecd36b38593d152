"""The critic's updates on a batch that has returns."""

from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.models.rows import ROW_FIELDS
from valor.trainer.phases.base import Metrics, Phase
from valor.trainer.phases.training_rows import CHOSEN, trained
from valor.trainer.phases.values import CRITIC_IS_UPDATED
from valor.workers.roles import critic_names


class UpdateCritic(Phase):
    """All mini-batches and epochs of the critic; none where its update gave the values, or it is frozen."""

    name = "update_critic"
    role = "critic"
    trains = True
    reads = frozenset((*ROW_FIELDS, "response_mask", "values", "returns", "uid"))

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        members = critic_names(config)
        more = [f"values/{name}" for name in members if len(members) > 1]
        self.reads_if_there = frozenset(("episode", "quantile_returns", "value_mask", CHOSEN, CRITIC_IS_UPDATED, *more))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.critic.enable

    def timing(self, batch: Batch, step: int) -> str | None:
        return None if CRITIC_IS_UPDATED in batch.meta else self.name

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        if CRITIC_IS_UPDATED in batch.meta:
            return Batch(), {}
        return Batch(), self.resources.critics.update(trained(batch), step)
