"""Does the run give the chosen algorithm what it needs? Asked before any model is loaded."""

from __future__ import annotations

from valor.algorithms import ADVANTAGES, POLICY_LOSSES
from valor.algorithms.custom import load_custom
from valor.config import PPOConfig
from valor.errors import UserError


def check_algorithms(config: PPOConfig) -> None:
    """UserError: an unknown estimator or policy loss, or one whose needs this configuration does not meet."""
    load_custom(config.algorithm.custom_path)
    name, rollout = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout
    needs = ADVANTAGES[name].capability
    POLICY_LOSSES[config.actor_rollout_ref.actor.policy_loss.loss_mode]
    if needs.needs_critic and not config.critic.enable:
        raise UserError(f"algorithm.adv_estimator={name} needs a critic: set critic.enable=true")
    if rollout.n < needs.min_group_size:
        raise UserError(
            f"algorithm.adv_estimator={name} compares samples of one prompt: set actor_rollout_ref.rollout.n to at "
            f"least {needs.min_group_size}, it is {rollout.n}"
        )
    for needed, what in (
        (needs.needs_components, "named reward components"),
        (needs.needs_sum_pi_squared, "the sum of squared probabilities from the actor"),
    ):
        if needed:
            raise UserError(f"algorithm.adv_estimator={name} needs {what}, which runs do not give it in this version")
