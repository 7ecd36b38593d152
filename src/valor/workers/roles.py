"""The roles of a run: a row for each says its worker class, its section, when a run has it, and whether it trains."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from valor.config import PPOConfig
from valor.workers.actor import ActorWorker
from valor.workers.critic import CriticWorker
from valor.workers.host import RoleSpec
from valor.workers.reference import ReferenceWorker
from valor.workers.reward_model import RewardModelWorker
from valor.workers.rollout import RolloutWorker


def critic_names(config: PPOConfig) -> list[str]:
    """The critic's roles: none, `critic`, or `critic`, `critic_2`, … for an ensemble."""
    return ROLES["critic"].names(config, "critic") if ROLES["critic"].wanted(config) else []


@dataclass(frozen=True)
class RunFacts:
    """What workers are built from besides the configuration.

    `separator_id`: the token between the texts of a pair, for a reward model that reads pairs.
    """

    total_steps: int
    eos_token_ids: list[int]
    separator_id: int | None = None


def _config_alone(config: PPOConfig, facts: RunFacts) -> dict[str, Any]:
    return {"config": config}


@dataclass(frozen=True)
class Role:
    """A row of `ROLES`.

    worker: the class of its ranks. section: its part of the configuration. wanted: whether a run has the role.
    trains: it has an optimizer; a role that does not train can be built again after a death. arguments: of the worker
    beside its context. movable: `resource_pools` may give it processes of its own; all other roles share the main pool.
    members: how many workers of this class learn side by side, each a role of its own.
    """

    worker: type
    section: Callable[[PPOConfig], Any]
    wanted: Callable[[PPOConfig], bool] = lambda config: True
    trains: bool = False
    arguments: Callable[[PPOConfig, RunFacts], dict[str, Any]] = _config_alone
    movable: bool = True
    members: Callable[[PPOConfig], int] = lambda config: 1

    def names(self, config: PPOConfig, name: str) -> list[str]:
        """`name`, `name_2`, …: one for each member."""
        return [name, *(f"{name}_{member}" for member in range(2, self.members(config) + 1))]


def _actor(config: PPOConfig, facts: RunFacts) -> dict[str, Any]:
    # Learning rates are scheduled over the steps in which the role learns.
    return {"config": config, "total_steps": max(facts.total_steps - config.trainer.critic_warmup, 0)}


def _critic(config: PPOConfig, facts: RunFacts) -> dict[str, Any]:
    steps = sum(not config.critic.frozen_at(step) for step in range(1, facts.total_steps + 1))
    return {"config": config, "total_steps": steps}


ROLES: dict[str, Role] = {  # in building order: a rollout beside the actor lives on its weights
    "actor": Role(
        ActorWorker, lambda config: config.actor_rollout_ref.actor, trains=True, arguments=_actor, movable=False
    ),
    "rollout": Role(
        RolloutWorker,
        lambda config: config.actor_rollout_ref.rollout,
        arguments=lambda config, facts: {"config": config, "eos_token_ids": facts.eos_token_ids},
    ),
    "ref": Role(
        ReferenceWorker,
        lambda config: config.actor_rollout_ref.ref,
        wanted=lambda config: config.needs_reference,
        arguments=lambda config, facts: {"config": config.actor_rollout_ref},
    ),
    "critic": Role(
        CriticWorker,
        lambda config: config.critic,
        wanted=lambda config: config.critic.enable,
        trains=True,
        arguments=_critic,
        members=lambda config: config.critic.ensemble_size,
    ),
    "reward_model": Role(
        RewardModelWorker,
        lambda config: config.reward.reward_model,
        wanted=lambda config: config.reward.reward_model.is_role,
        arguments=lambda config, facts: {
            "config": config.reward.reward_model,
            "separator_id": facts.separator_id,
        },
    ),
}


def role_specs(
    config: PPOConfig, *, total_steps: int, eos_token_ids: list[int], separator_id: int | None = None
) -> dict[str, RoleSpec]:
    """What to build for a run, in building order."""
    facts, specs = RunFacts(total_steps, eos_token_ids, separator_id), dict[str, RoleSpec]()
    for role, row in ROLES.items():
        for member, name in enumerate(row.names(config, role)) if row.wanted(config) else ():
            arguments = row.arguments(config, facts) | ({"member": member} if member else {})
            specs[name] = RoleSpec(row.worker, arguments, replaceable=not row.trains)
    return specs
