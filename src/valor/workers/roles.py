"""The roles of a run: a row for each says its worker class, its section, when a run has it, and whether it trains."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from valor.config import PPOConfig
from valor.workers.actor import ActorWorker
from valor.workers.critic import CriticWorker
from valor.workers.host import RoleSpec, RunFacts
from valor.workers.probe import ProbeCritic
from valor.workers.reference import ReferenceWorker
from valor.workers.reward_model import RewardModelWorker
from valor.workers.rollout import RolloutWorker
from valor.workers.teacher import TeacherWorker


def critic_names(config: PPOConfig) -> list[str]:
    """The critic's roles: none, `critic`, or `critic`, `critic_2`, … for an ensemble."""
    return ROLES["critic"].names(config, "critic") if ROLES["critic"].wanted(config) else []


@dataclass(frozen=True)
class Role:
    """A row of `ROLES`.

    worker: the class of its ranks, built from the configuration, RunFacts, and its number in `members`. section: its
    part of the configuration. wanted: whether a run has the role. steps: in how many of a run's steps it learns, over
    which learning rates are scheduled; None: it does not train. changes: whether its weights change, so that they are
    part of a checkpoint and it cannot be built again after a death. movable: `resource_pools` may give it processes of
    its own. members: how many of them there are side by side, each a role.
    kinds: classes in place of `worker`, by the section's `kind`.
    """

    worker: type
    section: Callable[[PPOConfig], Any]
    wanted: Callable[[PPOConfig], bool] = lambda config: True
    steps: Callable[[PPOConfig, int], int] | None = None
    changes: Callable[[PPOConfig], bool] = lambda config: False
    movable: bool = True
    members: Callable[[PPOConfig], int] = lambda config: 1
    kinds: Mapping[str, type] = field(default_factory=dict)

    def names(self, config: PPOConfig, name: str) -> list[str]:
        """`name`, `name_2`, …: one for each member."""
        return [name, *(f"{name}_{member}" for member in range(2, self.members(config) + 1))]


ROLES: dict[str, Role] = {  # in building order: a rollout beside the actor lives on its weights
    "actor": Role(
        ActorWorker,
        lambda config: config.actor_rollout_ref.actor,
        steps=lambda config, total: max(total - config.trainer.critic_warmup, 0),
        movable=False,
    ),
    "rollout": Role(RolloutWorker, lambda config: config.actor_rollout_ref.rollout),
    "ref": Role(
        ReferenceWorker, lambda config: config.actor_rollout_ref.ref, wanted=lambda config: config.needs_reference
    ),
    "teacher": Role(
        TeacherWorker,
        lambda config: config.distillation,
        wanted=lambda config: config.distillation.enabled and bool(config.distillation.models),
        changes=lambda config: config.distillation.moves,
        members=lambda config: len(config.distillation.models),
    ),
    "critic": Role(
        CriticWorker,
        lambda config: config.critic,
        wanted=lambda config: config.critic.enable,
        steps=lambda config, total: sum(not config.critic.frozen_at(step) for step in range(1, total + 1)),
        members=lambda config: config.critic.ensemble_size,
        kinds={"probe": ProbeCritic},
    ),
    "reward_model": Role(
        RewardModelWorker,
        lambda config: config.reward.reward_model,
        wanted=lambda config: config.reward.reward_model.is_role,
    ),
}


def teacher_names(config: PPOConfig) -> list[str]:
    """The role of each of `distillation.teacher_models`: `teacher`, `teacher_2`, …, or `actor`."""
    teach = config.distillation
    return ROLES["teacher"].names(config, "teacher") if teach.models else ["actor"] * len(teach.teacher_models)


def role_specs(
    config: PPOConfig, *, total_steps: int, eos_token_ids: list[int], separator_id: int | None = None
) -> dict[str, RoleSpec]:
    """What to build for a run, in building order."""
    specs: dict[str, RoleSpec] = {}
    for role, row in ROLES.items():
        steps = 0 if row.steps is None else row.steps(config, total_steps)
        facts = RunFacts(steps, eos_token_ids, separator_id)
        for member, name in enumerate(row.names(config, role)) if row.wanted(config) else ():
            arguments = {"config": config, "facts": facts} | ({"member": member} if member else {})
            worker = row.kinds.get(getattr(row.section(config), "kind", ""), row.worker)
            specs[name] = RoleSpec(worker, arguments, replaceable=row.steps is None and not row.changes(config))
    return specs
