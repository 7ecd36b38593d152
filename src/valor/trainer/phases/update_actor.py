"""The policy's updates on a batch that has advantages."""

from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.models.rows import ROW_FIELDS
from valor.trainer.old_log_probs import WEIGHTS, OldLogProbs
from valor.trainer.phases.base import Metrics, Phase
from valor.trainer.phases.old_log_probs import correction_plan
from valor.trainer.phases.training_rows import CHOSEN, trained


class UpdateActor(Phase):
    """All mini-batches and epochs of the policy, once the critic has warmed up."""

    name = "update_actor"
    role = "actor"
    trains = True
    reads = frozenset((*ROW_FIELDS, "response_mask", "rollout_log_probs", "advantages"))
    reads_if_there = frozenset(("episode", "turn_ids", WEIGHTS, "entropy_mask", "positive", CHOSEN))

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        actor = config.actor_rollout_ref.actor
        more = ["old_log_probs"] * (not OldLogProbs.of(config).on_policy)
        more += ["ref_log_probs"] * (actor.use_kl_loss and not actor.exact_kl_loss)
        self.reads = self.reads | {*more}

    def plan(self) -> str:
        old, warmup = OldLogProbs.of(self.config), self.config.trainer.critic_warmup
        parts = [f"policy loss {self.config.policy_loss}"]
        parts += ["one update a batch, so the ratio is 1"] * old.on_policy
        parts += [correction_plan(self.config)] * old.correct_mini_batches
        parts += [f"from step {warmup + 1}"] * bool(warmup)
        return ", ".join(parts)

    def refuse(self, batch: Batch) -> None:
        self.resources.updates.check(batch)

    def timing(self, batch: Batch, step: int) -> str | None:
        return self.name if self._learns(step) else None

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        return Batch(), self.resources.updates.run("actor", trained(batch), step) if self._learns(step) else {}

    def _learns(self, step: int) -> bool:
        return step > self.config.trainer.critic_warmup
