"""Does the run give the chosen algorithms and engine what they need? Asked before any model is loaded."""

from __future__ import annotations

from collections.abc import Collection

import torch

from valor import algorithms
from valor.algorithms import ADVANTAGES, POLICY_LOSSES, VALUE_LOSSES, load_custom
from valor.algorithms.registry import Entry
from valor.config import PPOConfig
from valor.errors import UserError
from valor.models.load import load_model_config
from valor.rollout.vllm_options import check_vllm
from valor.trainer.advantage import FROM_THE_RUN, offered_settings
from valor.workers.actor import policy_loss_options
from valor.workers.critic import value_head


def check_algorithms(config: PPOConfig) -> None:
    """UserError: an unknown name or option, or an algorithm whose needs this configuration does not meet."""
    load_custom(config.algorithm.custom_path)
    _check_estimator(config)
    _check_policy_loss(config)
    check_value_loss(config)
    _check_correction(config)


def check_engine(config: PPOConfig, world_size: int) -> None:
    """UserError: a rollout engine that is not installed, or that the model and the processes do not fit."""
    shared = config.actor_rollout_ref
    if shared.rollout.name == "vllm":
        check_vllm(shared.rollout, load_model_config(shared.model), world_size)


def _check_estimator(config: PPOConfig) -> None:
    algorithm, n = config.algorithm, config.actor_rollout_ref.rollout.n
    name = algorithm.adv_estimator
    needs, options = ADVANTAGES[name].capability, algorithms.advantage_options(name)
    if needs.needs_critic and not config.critic.enable:
        raise UserError(f"algorithm.adv_estimator={name} needs a critic: set critic.enable=true")
    alone_is_fine = "singleton" in options and algorithm.singleton == "raw"
    if n < needs.min_group_size and not alone_is_fine:
        raise UserError(
            f"algorithm.adv_estimator={name} compares samples of one prompt: set actor_rollout_ref.rollout.n to at "
            f"least {needs.min_group_size}, it is {n}"
        )
    if algorithm.filter_groups.enable and n < 2:
        raise UserError("algorithm.filter_groups drops prompts whose samples agree: set actor_rollout_ref.rollout.n")
    if needs.needs_components:
        _check_components(config)
    if needs.needs_sum_pi_squared and algorithm.rollout_correction.bypass_mode:
        raise UserError(
            f"algorithm.adv_estimator={name} needs a pass of the actor over each batch, which bypass_mode leaves out: "
            "set algorithm.rollout_correction.bypass_mode=false"
        )
    if algorithm.truncation_bootstrap and "bootstrap_mask" not in options:
        raise UserError(f"algorithm.truncation_bootstrap=true is not for algorithm.adv_estimator={name}: use gae")
    taken = {*offered_settings(algorithm), *FROM_THE_RUN}
    _check_options(ADVANTAGES[name], "algorithm.adv_kwargs", algorithm.adv_kwargs, options, taken)


def _check_components(config: PPOConfig) -> None:
    algorithm = config.algorithm
    head = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    if not algorithm.gdpo_reward_keys:
        raise UserError(f"{head} needs algorithm.gdpo_reward_keys: the reward components that the graders report")
    if algorithm.use_kl_in_reward:
        raise UserError(
            f"{head} reads reward components, which algorithm.use_kl_in_reward does not touch: use "
            "actor_rollout_ref.actor.use_kl_loss instead"
        )


def _check_policy_loss(config: PPOConfig) -> None:
    actor, name = config.actor_rollout_ref.actor, config.policy_loss
    entry = POLICY_LOSSES[name]
    fixed = entry.capability.aggregation
    if fixed is not None and actor.loss_agg_mode not in ("token-mean", fixed):
        raise UserError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={name} always aggregates as {fixed}: remove "
            f"actor_rollout_ref.actor.loss_agg_mode={actor.loss_agg_mode}"
        )
    key, given = "actor_rollout_ref.actor.policy_loss.loss_kwargs", actor.policy_loss.loss_kwargs
    taken = {*type(actor).model_fields, *type(actor.policy_loss).model_fields, "generator"}
    _check_options(entry, key, given, algorithms.policy_loss_options(name), taken)
    if entry.builtin:  # options that contradict each other are found by trying them
        one = torch.ones(1, 1)
        algorithms.policy_loss(
            name,
            log_probs=-one,
            old_log_probs=-one,
            advantages=one,
            response_mask=one,
            **policy_loss_options(actor, name),
        )


def check_value_loss(config: PPOConfig) -> None:
    """UserError: an unknown value loss or option, or options that contradict each other."""
    if not config.critic.enable:
        return
    name, given = config.critic.value_loss, config.critic.value_loss_kwargs
    entry = VALUE_LOSSES[name]
    _check_options(entry, "critic.value_loss_kwargs", given, algorithms.value_loss_options(name))
    if entry.builtin:
        one, outputs = torch.ones(1, 1), torch.ones(1, 1, value_head(config.critic).size).squeeze(-1)
        algorithms.value_loss(name, values=outputs, old_values=one, returns=one, response_mask=one, **given)


def _check_correction(config: PPOConfig) -> None:
    correction, one = config.algorithm.rollout_correction, torch.ones(1, 1)
    algorithms.rollout_correction(
        log_probs=-one,
        rollout_log_probs=-one,
        response_mask=one,
        **correction.model_dump(exclude={"bypass_mode", "loss_type"}),
    )


def _check_options(
    entry: Entry, key: str, given: Collection[str], options: Collection[str], taken: Collection[str] = ()
) -> None:
    """Names under `key` must be `options` of the algorithm, and have no source of their own (`taken`)."""
    for option in given:
        if option in taken:
            raise UserError(f"{key}.{option} is not set here: it has a key of its own or comes from the run")
        if option not in options and not entry.takes_any:
            known = ", ".join(sorted(set(options) - set(taken))) or "none"
            raise UserError(f"{key}.{option}: {entry.name} has no such option (it has {known})")
