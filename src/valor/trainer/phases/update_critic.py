"""The critic's updates on a batch that has returns."""

from collections.abc import Iterator

import torch

from valor import algorithms
from valor.algorithms import VALUE_LOSSES
from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.models.rows import ROW_FIELDS
from valor.trainer.phases.base import Metrics, Phase, option_mistakes
from valor.trainer.phases.group_baseline import BASELINE, OUTPUTS
from valor.trainer.phases.training_rows import CHOSEN, trained
from valor.trainer.phases.values import CRITIC_IS_UPDATED
from valor.trainer.prompt_templates import CRITIC_PROMPTS
from valor.workers.critic import value_head
from valor.workers.probe import POLICY_MASK
from valor.workers.roles import critic_names

_OTHERS = (BASELINE, OUTPUTS, CHOSEN, CRITIC_IS_UPDATED)


class UpdateCritic(Phase):
    """All mini-batches and epochs of the critic; none where its update gave the values, or it is frozen."""

    name = "update_critic"
    role = "critic"
    trains = True
    reads = frozenset((*ROW_FIELDS, "response_mask", "values", "returns"))

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        members = critic_names(config)
        more = [f"values/{name}" for name in members if len(members) > 1]
        self.reads_if_there = frozenset(("episode", "value_mask", POLICY_MASK, *CRITIC_PROMPTS, *_OTHERS, *more))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.critic.enable and not config.replays

    def plan(self) -> str:
        return "the regression, refitted for the next step" if self.config.has_probe else super().plan()

    @classmethod
    def contradictions(cls, config: PPOConfig) -> Iterator[str]:
        if config.has_value_model:
            yield from value_loss_mistakes(config)

    def skips(self, batch: Batch, step: int) -> bool:
        return CRITIC_IS_UPDATED in batch.meta

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        return Batch(), self.resources.critics.update(self.rows(batch), step)

    @staticmethod
    def rows(batch: Batch) -> Batch:
        """What the critic trains on: `values` and `returns` are its own outputs and their targets."""
        rows = trained(batch)
        if OUTPUTS in rows:
            rows = rows.union(Batch({"values": rows[OUTPUTS]}))
        if BASELINE in rows:
            rows = rows.union(Batch({"returns": rows["returns"] - rows[BASELINE][:, None]}))
        return rows


def value_loss_mistakes(config: PPOConfig) -> Iterator[str]:
    """Wrong options of `critic.value_loss`, those that contradict each other found by using them on one token.

    UserError: there is no such loss, or it refuses its options.
    """
    name, options = config.critic.value_loss, config.critic.value_loss_kwargs
    entry = VALUE_LOSSES[name]
    lines = list(option_mistakes(entry, "critic.value_loss_kwargs", options, entry.options))
    if entry.builtin and not lines:
        x, outputs = torch.ones(1, 1), torch.ones(1, 1, value_head(config.critic).size).squeeze(-1)
        algorithms.value_loss(name, values=outputs, old_values=x, returns=x, response_mask=x, **options)
    yield from lines
