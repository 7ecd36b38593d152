"""The policy's updates on a batch that has advantages."""

from collections.abc import Iterator

import torch

from valor import algorithms
from valor.algorithms import POLICY_LOSSES
from valor.algorithms.ppo import aggregation
from valor.config import PPOConfig
from valor.data.batch import Batch, Episodes
from valor.errors import StepRefused, UserError
from valor.models.routing import ROUTES
from valor.models.rows import ROW_FIELDS
from valor.rollout.registry import GENERATION_ENGINES
from valor.trainer.old_log_probs import WEIGHTS, OldLogProbs
from valor.trainer.phases.base import Metrics, Phase, option_mistakes
from valor.trainer.phases.old_log_probs import correction_plan
from valor.trainer.phases.training_rows import CHOSEN, trained
from valor.trainer.updates import compared_columns
from valor.workers.actor import policy_loss_options


class UpdateActor(Phase):
    """All mini-batches and epochs of the policy; none while the critic warms up (`trainer.critic_warmup`)."""

    name = "update_actor"
    role = "actor"
    trains = True
    reads = frozenset((*ROW_FIELDS, "response_mask", "rollout_log_probs", "advantages"))
    reads_if_there = frozenset(("episode", "turn_ids", WEIGHTS, "positive", CHOSEN, ROUTES))

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.reads = self.reads | {*compared_columns(config)}

    @classmethod
    def contradictions(cls, config: PPOConfig) -> Iterator[str]:
        actor, name, warmup = config.actor_rollout_ref.actor, config.policy_loss, config.trainer.critic_warmup
        if warmup > 0 and not config.critic.enable:
            yield f"trainer.critic_warmup={warmup} needs a critic: set critic.enable=true"
        elif warmup > 0 and config.critic.freeze:
            yield "trainer.critic_warmup trains the critic and critic.freeze=true does not: drop one of them"
        mode, loss_type = actor.policy_loss.loss_mode, config.algorithm.rollout_correction.loss_type
        if name != mode and mode not in ("vanilla", "reinforce"):
            yield (
                f"algorithm.rollout_correction.loss_type={loss_type} and actor_rollout_ref.actor.policy_loss.loss_mode="
                f"{mode} are two policy losses: use loss_type=ppo_clip, or leave loss_mode at vanilla"
            )
        if actor.router_replay.mode == "R3":
            yield from _replay_mistakes(config)
        entry, key = POLICY_LOSSES[name], "actor_rollout_ref.actor.policy_loss.loss_kwargs"
        aggregation(entry, actor.loss_agg_mode)
        provided = {*type(actor).model_fields, *type(actor.policy_loss).model_fields, "generator"}
        lines = list(option_mistakes(entry, key, actor.policy_loss.loss_kwargs, entry.options, provided))
        yield from lines
        if entry.builtin and not lines:  # options that contradict each other are found by using them on one token
            x, options = torch.ones(1, 1), policy_loss_options(actor, name)
            inputs = {"log_probs": -x, "old_log_probs": -x, "advantages": x, "turn_ids": x.long()}
            try:
                algorithms.policy_loss(name, **inputs, response_mask=x, **options)
            except (UserError, TypeError, ValueError) as error:
                yield f"actor_rollout_ref.actor.policy_loss.loss_mode={name}: {error}"

    def plan(self) -> str:
        old, warmup = OldLogProbs(self.config), self.config.trainer.critic_warmup
        parts = [f"policy loss {self.config.policy_loss}"]
        parts += ["one update a batch, so the ratio is 1"] * old.on_policy
        parts += [correction_plan(self.config)] * old.correct_mini_batches
        parts += ["experts as in generation"] * (self.config.actor_rollout_ref.actor.router_replay.mode == "R3")
        parts += [f"from step {warmup + 1}"] * bool(warmup)
        return ", ".join(parts)

    def refuse(self, batch: Batch) -> None:
        loss = POLICY_LOSSES[self.config.policy_loss]
        if loss.capability.one_row and Episodes(batch).forked:
            raise StepRefused(
                f"policy loss {loss.name} has to see a response at once, and this step has episodes in several rows "
                "(the chat template, or the agent, has rewritten what was said): use "
                "actor_rollout_ref.actor.policy_loss.loss_mode=turn_ppo or gspo"
            )

    def skips(self, batch: Batch, step: int) -> bool:
        return step <= self.config.trainer.critic_warmup

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        return Batch(), self.resources.updates.run("actor", trained(batch), step)


def _replay_mistakes(config: PPOConfig) -> Iterator[str]:
    """What has no experts to choose again."""
    rollout, at = config.actor_rollout_ref.rollout.name, "actor_rollout_ref.actor.router_replay.mode=R3"
    if not GENERATION_ENGINES[rollout].records:
        yield f"{at}: rollout.name={rollout} does not record which experts it chose: set rollout.name=native"
    if config.actor_rollout_ref.actor.strategy == "megatron":
        yield f"{at}: strategy=megatron routes tokens by itself: set actor_rollout_ref.actor.strategy=fsdp2"
    if config.plays_episodes:
        yield f"{at} is for single answers, and here episodes are played: set it to disabled"
