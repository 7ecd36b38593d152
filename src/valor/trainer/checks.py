"""What contradicts the algorithms, engines and places that a configuration names: asked before any model is loaded."""

from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

import torch
from pydantic import BaseModel

from valor import algorithms
from valor.algorithms import ADVANTAGES, POLICY_LOSSES, VALUE_LOSSES, load_custom
from valor.algorithms.ppo import aggregation
from valor.algorithms.registry import Entry
from valor.config import CriticRunConfig, PPOConfig, Section
from valor.config import inert_settings as inert_by_rules
from valor.config.tree import flatten, get_at, matches
from valor.controller.placement import Placement, check_placement, resolve_placement, resolve_pool
from valor.data.batch import Batch
from valor.engines.registry import TRAINING_ENGINES
from valor.errors import UserError
from valor.rollout.registry import GENERATION_ENGINES
from valor.tracking.loggers import LOGGERS, find_logger
from valor.trainer.advantage import COMPONENTS, FROM_THE_RUN, compute_advantages, from_critic, offered_settings
from valor.trainer.phases.schedule import Schedule
from valor.trainer.phases.standard import phases_of
from valor.workers.actor import policy_loss_options
from valor.workers.critic import value_head

_BFLOAT16_STEPS = 2**9  # of a weight: what is less than that part of it is rounded away
_LOG_PROBS = ("old_log_probs", "rollout_log_probs")


def check(config: BaseModel) -> list[str]:
    """Every mistake that those who act on `config` find in it, a line each. Runs the file `algorithm.custom_path`."""
    loggers = _loggers(config)
    if not isinstance(config, PPOConfig):
        return loggers
    try:
        load_custom(config.algorithm.custom_path)
    except UserError as error:  # its algorithms are not known
        return [*loggers, *str(error).splitlines()]
    checks = [_value_loss, _generator, _training_engines]
    if not isinstance(config, CriticRunConfig):
        checks += [_estimator, _policy_loss, _correction, check_placement, _phases]
    lines = loggers
    for find in checks:
        try:
            lines += find(config)
        except UserError as error:
            lines += str(error).splitlines()
    return lines


def derived(config: BaseModel) -> dict[str, Any]:
    """Values of keys that are null by the algorithms that `config` names. Runs the file `algorithm.custom_path`."""
    if not isinstance(config, PPOConfig):
        return {}
    with suppress(UserError):  # `check` tells it
        load_custom(config.algorithm.custom_path)
        return {"critic.enable": True} if ADVANTAGES[config.algorithm.adv_estimator].capability.needs_critic else {}
    return {}


def _loggers(config: BaseModel) -> list[str]:
    """Loggers that nobody knows. Missing packages are told of when the run starts, on the machine that runs."""
    lines = []
    for name in get_at(config.model_dump(include={"trainer"}), "trainer.logger"):
        try:
            if name not in LOGGERS:
                find_logger(name)
        except UserError as error:
            lines.append(str(error))
    return lines


def _generator(config: PPOConfig) -> list[str]:
    return [] if config.generator is None else GENERATION_ENGINES[config.generator].check(config)


def _training_engines(config: PPOConfig) -> list[str]:
    policy, critic = config.actor_rollout_ref, config.critic
    judge = config.reward.reward_model
    roles = [
        (policy.actor, True),
        (policy.ref, config.needs_reference),
        (critic, critic.enable),
        (judge, judge.is_role),
    ]
    for strategy in {role.strategy for role, is_there in roles if is_there}:
        _ = TRAINING_ENGINES[strategy]
    actor, ref = policy.actor, policy.ref
    staged = actor.strategy == "megatron" and actor.megatron.pipeline_model_parallel_size > 1
    if "full" in config.kl_kinds and (actor.strategy != ref.strategy or staged):
        return ["the exact KL is that of whole distributions: give actor and reference one strategy, and one stage"]
    return []


def _estimator(config: PPOConfig) -> list[str]:
    algorithm, n = config.algorithm, config.actor_rollout_ref.rollout.n
    name = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    entry = ADVANTAGES[algorithm.adv_estimator]
    needs, options = entry.capability, entry.options
    few = n < needs.min_group_size and not ("singleton" in options and algorithm.singleton == "raw")
    by_value = from_critic(algorithm)  # A = V(last) - V
    weighs_returns = entry.builtin and options >= set(_LOG_PROBS)
    reads_the_end = algorithm.truncation_bootstrap or (
        algorithm.reward_mask_ratio > 0 and algorithm.missing_reward in ("bootstrap", "critic")
    )
    wrong = {
        f"{name} needs a critic: set critic.enable=true, or an estimator that does without, such as grpo or rloo": (
            needs.needs_critic and not config.critic.enable
        ),
        f"{name} compares samples of one prompt: set actor_rollout_ref.rollout.n to at least {needs.min_group_size}, "
        f"it is {n}": few,
        f"{name} needs a pass of the actor over each batch, which bypass_mode leaves out: set "
        "algorithm.rollout_correction.bypass_mode=false": (
            (needs.needs_sum_pi_squared or weighs_returns) and algorithm.rollout_correction.bypass_mode
        ),
        f"{name} weighs what follows a token itself, as algorithm.rollout_correction.rollout_is=sequence does: use "
        "rollout_is=token or prefix": weighs_returns and algorithm.rollout_correction.rollout_is == "sequence",
        f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}: {algorithm.adv_estimator} compares with greedy "
        "responses of the same weights: set trainer_mode=sync": (
            needs.needs_greedy_baseline and config.trainer.v1.runs_ahead
        ),
        f"algorithm.truncation_bootstrap=true is not for {name}: use gae": (
            algorithm.truncation_bootstrap and "bootstrap_mask" not in options
        ),
        "algorithm.gae_unit=turn trains the critic where turns begin, while algorithm.truncation_bootstrap=true, and "
        "algorithm.missing_reward=bootstrap or critic, read it at the end: use gae_unit=token or bilevel": (
            algorithm.gae_unit == "turn" and "gae_unit" in options and not by_value and reads_the_end
        ),
        "algorithm.reward_source=critic leaves no reward to subtract algorithm.use_kl_in_reward from: use "
        "actor_rollout_ref.actor.use_kl_loss=true": by_value and algorithm.use_kl_in_reward,
        "algorithm.truncation_bootstrap=true is for rewards by rule: drop it": (
            by_value and algorithm.truncation_bootstrap
        ),
        "algorithm.filter_groups drops prompts whose samples agree: set actor_rollout_ref.rollout.n": (
            algorithm.filter_groups.enable and n < 2
        ),
    }
    if needs.needs_components:
        options = {*options, *COMPONENTS}
        wrong |= _components(name, config)
    taken = {*offered_settings(algorithm), *FROM_THE_RUN}
    lines = [line for line, is_so in wrong.items() if is_so]
    lines += _options(entry, "algorithm.adv_kwargs", algorithm.adv_kwargs, options, taken)
    if entry.builtin and needs.needs_critic and not lines:  # contradictions of its options are found by trying them
        one, names = torch.ones(1, 1), ("token_level_rewards", "response_mask", "values", *_LOG_PROBS)
        columns = {**dict.fromkeys(names, one), "turn_ids": one.long()}
        batch = Batch({**columns, "bootstrap_values": one[0]}, {"uid": ["a"], "finish_reason": ["stop"]})
        try:
            compute_advantages(batch, algorithm)
        except TypeError as error:  # a text where a number belongs
            lines.append(f"algorithm.adv_kwargs={algorithm.adv_kwargs}: {error}")
    return lines


def _components(name: str, config: PPOConfig) -> dict[str, bool]:
    """Mistakes of an estimator that compares reward components, and whether they are made."""
    algorithm, model = config.algorithm, config.reward.reward_model
    keys, weights = (algorithm.adv_kwargs.get(option) for option in COMPONENTS)
    named = isinstance(keys, list) and len(keys) > 0
    fit = (
        isinstance(weights, list)
        and len(weights) == len(keys or [])
        and all(isinstance(w, int | float) for w in weights)
    )
    return {
        f"{name} needs algorithm.adv_kwargs.reward_keys: a list of components that the graders report": not named,
        f"algorithm.adv_kwargs.reward_weights={weights}: give a list with one number for each of reward_keys={keys}": (
            named and weights is not None and not fit
        ),
        f"{name} reads reward components, which algorithm.use_kl_in_reward does not touch: use "
        "actor_rollout_ref.actor.use_kl_loss instead": algorithm.use_kl_in_reward,
        f"{name} reads reward components, which algorithm.reward_mask_ratio and algorithm.reward_binarize do not "
        "touch: drop them or take another estimator": algorithm.reward_mask_ratio > 0 or algorithm.reward_binarize,
        f"{name} reads reward components, which reward.reward_model.gives=steps is none of: take another one": (
            model.enable and model.gives == "steps"
        ),
    }


def _policy_loss(config: PPOConfig) -> list[str]:
    actor, name = config.actor_rollout_ref.actor, config.policy_loss
    entry = POLICY_LOSSES[name]
    aggregation(entry, actor.loss_agg_mode)
    key, given = "actor_rollout_ref.actor.policy_loss.loss_kwargs", actor.policy_loss.loss_kwargs
    taken = {*type(actor).model_fields, *type(actor.policy_loss).model_fields, "generator"}
    lines = _options(entry, key, given, entry.options, taken)
    if entry.builtin and not lines:  # options that contradict each other are found by trying them
        one, own = torch.ones(1, 1), policy_loss_options(actor, name)
        try:
            algorithms.policy_loss(
                name, log_probs=-one, old_log_probs=-one, advantages=one, response_mask=one, turn_ids=one.long(), **own
            )
        except (UserError, TypeError, ValueError) as error:
            lines.append(f"actor_rollout_ref.actor.policy_loss.loss_mode={name}: {error}")
    return lines


def _value_loss(config: PPOConfig) -> list[str]:
    if not config.critic.enable:
        return []
    name, given = config.critic.value_loss, config.critic.value_loss_kwargs
    entry = VALUE_LOSSES[name]
    lines = _options(entry, "critic.value_loss_kwargs", given, entry.options)
    if entry.builtin and not lines:
        one, outputs = torch.ones(1, 1), torch.ones(1, 1, value_head(config.critic).size).squeeze(-1)
        algorithms.value_loss(name, values=outputs, old_values=one, returns=one, response_mask=one, **given)
    if config.learns_quantiles and not isinstance(config, CriticRunConfig):
        lines += _own_quantiles(config)
    return lines


def _own_quantiles(config: PPOConfig) -> list[str]:
    """What does not go with targets that are distributions."""
    algorithm = config.algorithm
    others = {
        "critic.ensemble_size": config.critic.ensemble_size > 1,
        "algorithm.reward_mask_ratio": algorithm.reward_mask_ratio > 0,
        "algorithm.reward_source=critic": algorithm.reward_source == "critic",
        "algorithm.truncation_bootstrap": algorithm.truncation_bootstrap,
        "algorithm.branch_values": algorithm.branch_values.share > 0,
        "an episode of several turns": config.plays_episodes,
    }
    why = "critic.value_loss=quantile with algorithm.lam_critic below 1 bootstraps each quantile, for which"
    return [f"{why} {other} has no rule: set algorithm.lam_critic=1" for other, is_so in others.items() if is_so]


def _phases(config: PPOConfig) -> list[str]:
    phases, lines = phases_of(config), list[str]()
    Schedule(phases)
    there = {"critic": config.critic.enable, "ref": config.needs_reference}
    there |= {"actor": True, "rollout": True, "reward_model": config.reward.reward_model.is_role}
    for phase in phases:
        if phase.role is not None and not there.get(phase.role):
            lines.append(f"phase '{phase.name}' runs in the role '{phase.role}', which this run does not have")
        lines += phase.contradictions(config)
    return lines


def _correction(config: PPOConfig) -> list[str]:
    correction, one = config.algorithm.rollout_correction, torch.ones(1, 1)
    options = correction.model_dump(exclude={"bypass_mode", "loss_type"})
    algorithms.rollout_correction(log_probs=-one, rollout_log_probs=-one, response_mask=one, **options)
    return []


def _options(
    entry: Entry, key: str, given: Collection[str], options: Collection[str], taken: Collection[str] = ()
) -> list[str]:
    """Names under `key` must be `options` of the algorithm, and have no source of their own (`taken`)."""
    lines = []
    for option in given:
        if option in taken:
            lines.append(f"{key}.{option} is not set here: it has a key of its own or comes from the run")
        elif option not in options and not entry.takes_any:
            known = ", ".join(sorted(set(options) - set(taken))) or "none"
            lines.append(f"{key}.{option}: {entry.name} has no such option (it has {known})")
    return lines


def placed(config: PPOConfig) -> Placement:
    """Where the run's roles live. UserError: there is no room, or the generation engine does not start there."""
    if isinstance(config, CriticRunConfig):  # policy and critic take turns
        placement = resolve_pool(config.trainer, config.ray_kwargs.ray_init.get("address"))
    else:
        placement = resolve_placement(config)
    if config.generator is not None:
        engine = GENERATION_ENGINES[config.generator]
        engine.check_start(config, placement.pools[placement.pool_of("rollout")].world_size)
    return placement


def lost_in_rounding(config: Section) -> Iterator[str]:
    """Of each role that is trained on bfloat16 weights: which of them an update cannot move."""
    flat = flatten(config.model_dump())
    for key, dtype in flat.items():
        at, is_dtype, _ = key.partition("fsdp_config.model_dtype")
        lr = flat.get(f"{at}optim.lr")
        untrained = at == "critic." and (not flat["critic.enable"] or flat["critic.freeze"])
        untrained |= isinstance(config, CriticRunConfig) and at != "critic."
        untrained |= flat.get(f"{at}strategy") == "megatron"  # which keeps float32 copies
        if is_dtype and dtype == "bfloat16" and lr is not None and not untrained:
            yield (
                f"{key}=bfloat16: an update of about {at}optim.lr={lr:g} is lost in rounding for every weight above "
                f"{lr * _BFLOAT16_STEPS:.1g}, and so are small changes of the optimizer's averages: take float32"
            )


def inert_settings(config: Section, explicit_keys: Collection[str]) -> dict[str, str]:
    """Those of `explicit_keys` that change nothing in this run, with the reason: by the keys' own rules, and because
    the chosen engine, estimator or loss does not read them."""
    found = inert_by_rules(config, explicit_keys)
    if isinstance(config, PPOConfig):
        found = dict(_not_read(config, explicit_keys)) | found
    return dict(sorted(found.items()))


def _not_read(config: PPOConfig, keys: Collection[str]) -> Iterator[tuple[str, str]]:
    shared, algorithm = config.actor_rollout_ref, config.algorithm
    reads = {engine.name: [*engine.reads] for engine in GENERATION_ENGINES.values()}
    if config.plays_episodes and shared.rollout.name in reads:
        reads[shared.rollout.name].append("max_model_len")  # bounds the rows of an episode
    kind = "actor_rollout_ref.actor.kl_loss_type"
    if kind in keys and shared.actor.use_kl_loss and shared.actor.kl_loss_type in ("kl", "k1"):
        yield kind, "as a loss this estimator pulls nowhere (its gradient has mean 0): use low_var_kl, k2 or kl+"
    special = [pattern for patterns in reads.values() for pattern in patterns] + ["engine_kwargs.*"]
    estimator, loss = ADVANTAGES[algorithm.adv_estimator], POLICY_LOSSES[config.policy_loss]
    of_estimators = offered_settings(algorithm).keys() - {"whitening"} | {"lam"}
    if not config.always_critic:  # a critic alone learns discounted outcomes, whatever the estimator
        of_estimators |= {"gamma"}
    for key in keys:
        section, _, name = key.rpartition(".")
        below_rollout = key.removeprefix("actor_rollout_ref.rollout.")
        if below_rollout != key and matches(below_rollout, special):
            if not matches(below_rollout, reads.get(shared.rollout.name, special)):
                yield key, f"no effect with rollout.name={shared.rollout.name}"
        elif section == "algorithm" and name in of_estimators:
            if not _takes(estimator, "lam_actor" if name == "lam" else name):
                yield key, f"no effect: adv_estimator={estimator.name} does not read it"
        elif key == "critic.cliprange_value" and not _takes(VALUE_LOSSES[config.critic.value_loss], name):
            yield key, f"no effect with critic.value_loss={config.critic.value_loss}, which does not clip"
        elif key == "actor_rollout_ref.actor.loss_agg_mode" and (mode := loss.capability.aggregation):
            yield key, f"no effect: policy loss {loss.name} always aggregates as {mode}"


def _takes(entry: Entry, option: str) -> bool:
    return entry.takes_any or option in entry.parameters
