"""Which roles a configuration asks for, and how each is built on its ranks."""

from valor.config import PPOConfig
from valor.workers.actor import ActorWorker
from valor.workers.critic import CriticWorker
from valor.workers.host import RoleSpec
from valor.workers.reference import ReferenceWorker
from valor.workers.reward_model import RewardModelWorker
from valor.workers.rollout import RolloutWorker


def critic_names(config: PPOConfig) -> list[str]:
    """The critic's roles: none, `critic`, or `critic`, `critic_2`, … for an ensemble."""
    if not config.critic.enable:
        return []
    return ["critic", *(f"critic_{member}" for member in range(2, config.critic.ensemble_size + 1))]


def role_specs(
    config: PPOConfig, *, total_steps: int, eos_token_ids: list[int], separator_id: int | None = None
) -> dict[str, RoleSpec]:
    """The roles of a run in building order (the rollout engine may live on the actor's weights, so that comes first).

    `separator_id`: the token between the texts of a pair, for a reward model that reads pairs. Learning rates are
    scheduled over those of the `total_steps` in which the role learns.
    """
    actor_steps = max(total_steps - config.trainer.critic_warmup, 0)
    critic_steps = sum(not config.critic.frozen_at(step) for step in range(1, total_steps + 1))
    specs = {
        "actor": RoleSpec(ActorWorker, {"config": config, "total_steps": actor_steps}),
        "rollout": RoleSpec(RolloutWorker, {"config": config, "eos_token_ids": eos_token_ids}, True),
    }
    if config.needs_reference:
        specs["ref"] = RoleSpec(ReferenceWorker, {"config": config.actor_rollout_ref}, True)
    for member, name in enumerate(critic_names(config)):
        specs[name] = RoleSpec(CriticWorker, {"config": config, "total_steps": critic_steps, "member": member})
    if config.reward.reward_model.is_role:
        specs["reward_model"] = RoleSpec(
            RewardModelWorker, {"config": config.reward.reward_model, "separator_id": separator_id}, True
        )
    return specs
