"""Mistakes in a configuration that the algorithms, engines and phases it names find, before any model is loaded."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from pydantic import BaseModel

from valor.algorithms import ADVANTAGES, POLICY_LOSSES, VALUE_LOSSES, load_custom
from valor.algorithms.registry import Entry
from valor.config import PPOConfig, Section
from valor.config import inert_settings as inert_by_rules
from valor.config.tree import flatten, get_at, matches, nested
from valor.controller.placement import Placement, check_placement, resolve_placement, resolve_pool, startable
from valor.engines.registry import TRAINING_ENGINES
from valor.errors import UserError
from valor.machine import memory
from valor.rollout.registry import GENERATION_ENGINES
from valor.tracking.loggers import LOGGERS, find_logger
from valor.trainer.advantage import offered_settings
from valor.trainer.memory_plan import GIB, Machine, estimate, gpu_bytes, token_budgets
from valor.trainer.missing import are_here
from valor.trainer.phases.schedule import Schedule
from valor.trainer.phases.standard import STANDARD, phases_of
from valor.trainer.phases.update_critic import value_loss_mistakes
from valor.workers.roles import role_specs

_CLIPS = {f"actor_rollout_ref.actor.{name}": name for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
_CLIPS["actor_rollout_ref.actor.clip_ratio"] = "clip_ratio_low"
_HEIRS = {  # keys that only give their value to others
    "algorithm.lam": ("algorithm.lam_actor", "algorithm.lam_critic"),
    "actor_rollout_ref.actor.clip_ratio": tuple(_CLIPS)[:2],
}
_BFLOAT16_STEPS = 2**9  # of a weight: what is less than that part of it is rounded away


def check(config: BaseModel) -> list[str]:
    """Every mistake in `config`, a line each. Runs the user's files `algorithm.custom_path` and `phases_path`."""
    lines = _lines(_loggers, config)
    if not isinstance(config, PPOConfig):
        return lines
    if unknown := _lines(_custom, config):  # its algorithms are not known
        return lines + unknown
    checks: list[Callable[[Any], Iterable[str]]] = [_generator, _training_engines]
    if config.trains_policy:
        checks += [check_placement, _phases]
    elif config.has_value_model:
        checks.append(value_loss_mistakes)
    return lines + [line for find in checks for line in _lines(find, config)]


def _lines(find: Callable[[Any], Iterable[str]], config: Any) -> list[str]:
    """The lines that `find` gives, and those of the UserError that ends it."""
    lines: list[str] = []
    try:
        lines.extend(find(config))
    except UserError as error:
        lines.extend(str(error).splitlines())
    return lines


def derived(config: BaseModel) -> dict[str, Any]:
    """Values of keys that are null, by the algorithms that `config` names, and by the memory of the GPUs here. Runs the
    file `algorithm.custom_path`."""
    values: dict[str, Any] = {}
    if not isinstance(config, PPOConfig):
        return values
    with suppress(UserError):  # `check` tells it
        load_custom(config.algorithm.custom_path)
        if ADVANTAGES[config.algorithm.adv_estimator].capability.needs_critic:
            values["critic.enable"] = True
        if not config.trains_policy or "megatron" in (config.actor_rollout_ref.actor.strategy, config.critic.strategy):
            return values
        if config.trainer.device != "cpu" and (size := gpu_bytes()):
            processes = (config.trainer.n_gpus_per_node or torch.cuda.device_count()) * config.trainer.nnodes
            filled = type(config).model_validate(nested(flatten(config.model_dump()) | values))
            values |= token_budgets(filled, Machine("cuda", processes, size))
    return values


def _loggers(config: BaseModel) -> Iterator[str]:
    """Unknown loggers. Missing packages are told of when the run starts, on the machine that runs."""
    for name in get_at(config.model_dump(include={"trainer"}), "trainer.logger"):
        try:
            if name not in LOGGERS:
                find_logger(name)
        except UserError as error:
            yield str(error)


def _custom(config: PPOConfig) -> Iterable[str]:
    load_custom(config.algorithm.custom_path)
    return ()


def _generator(config: PPOConfig) -> Iterable[str]:
    return () if config.generator is None else GENERATION_ENGINES[config.generator].check(config)


def _training_engines(config: PPOConfig) -> Iterator[str]:
    strategies = {key: name for key, name in flatten(config.model_dump()).items() if key.endswith(".strategy")}
    for key in strategies.keys() - inert_by_rules(config, strategies):  # of the roles that this run has
        _ = TRAINING_ENGINES[strategies[key]]
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    staged = actor.strategy == "megatron" and actor.megatron.pipeline_model_parallel_size > 1
    if "full" in config.kl_kinds and (actor.strategy != ref.strategy or staged):
        yield "the exact KL is that of whole distributions: give actor and reference one strategy, and one stage"


def _phases(config: PPOConfig) -> Iterator[str]:
    """What the phases of a step find: settings they cannot be combined with, roles and columns that are not there."""
    if config.algorithm.filter_groups.enable and config.actor_rollout_ref.rollout.n < 2:
        yield "algorithm.filter_groups drops prompts whose samples agree: set actor_rollout_ref.rollout.n"
    try:
        phases = phases_of(config)
    except UserError as error:  # an unknown algorithm, or no list: as far as possible the standard phases are asked
        lines = str(error).splitlines()
        for phase in STANDARD:
            lines += _lines(
                lambda config, phase=phase: phase.contradictions(config) if phase.wanted(config) else (), config
            )
        yield from lines
        return
    lines, roles = list[str](), role_specs(config, total_steps=1, eos_token_ids=[])
    for phase in phases:
        mistakes = _lines(phase.contradictions, config)
        if not mistakes and phase.role is not None and phase.role not in roles:
            mistakes = [f"phase '{phase.name}' runs in the role '{phase.role}', which this run does not have"]
        lines += mistakes
    yield from lines
    if not lines:
        Schedule(phases)


def placed(config: PPOConfig) -> Placement:
    """The processes of the run's roles. UserError: there is no room, or the generation engine does not start there."""
    if not config.trains_policy:  # the roles take turns
        placement = resolve_pool(config.trainer, config.ray_kwargs.ray_init.get("address"))
    else:
        placement = resolve_placement(config)
    if config.generator is not None:
        engine = GENERATION_ENGINES[config.generator]
        engine.check_start(config, placement.pools[placement.pool_of("rollout")].world_size)
    return startable(placement)


def lost_in_rounding(config: Section) -> Iterator[str]:
    """A line for each role that is trained on bfloat16 weights, with the size of weights that no update can move."""
    flat = flatten(config.model_dump())
    for key, lr in flat.items():
        at = key.removesuffix("optim.lr")
        in_bfloat16 = at != key and flat.get(f"{at}fsdp_config.model_dtype") == "bfloat16"
        # Megatron keeps float32 copies.
        if in_bfloat16 and flat.get(f"{at}strategy") != "megatron" and not inert_by_rules(config, [key]):
            yield (
                f"{at}fsdp_config.model_dtype=bfloat16: an update of about {key}={lr:g} is lost in rounding for every "
                f"weight above {lr * _BFLOAT16_STEPS:.1g}, and so are small changes of the optimizer's averages: take "
                "float32"
            )


def lacks_memory(config: Section) -> Iterator[str]:
    """A line where a run on this machine's CPUs may need more memory than is available."""
    if not isinstance(config, PPOConfig) or not config.trains_policy:
        return
    trainer, critic = config.trainer, config.critic
    on_gpus = trainer.device == "cuda" or (trainer.device == "auto" and torch.cuda.is_available())
    models = [config.actor_rollout_ref.model.path, critic.model.path if config.has_value_model else None]
    if on_gpus or not are_here(*models):  # others are downloaded first
        return
    elsewhere = trainer.nnodes > 1 or os.environ.get("RAY_ADDRESS") or config.ray_kwargs.ray_init.get("address")
    if elsewhere or "megatron" in (config.actor_rollout_ref.actor.strategy, critic.strategy):
        return
    processes, available = trainer.n_gpus_per_node or 1, memory().available
    machine = Machine("cpu", processes, available / processes)
    with suppress(UserError):  # a model that cannot be read: whoever loads it tells
        expected = estimate(config, machine)
        if expected.fits(machine):
            return
        needed = processes * expected.peak(expected.worst) / GIB
        yield (
            f"the run may need {needed:.1f} GiB ({expected.worst}), and {available / GIB:.1f} are available: the "
            "kernel ends what needs more; `valor plan` with the same settings says what would make it fit"
        )


def inert_settings(config: Section, explicit_keys: Collection[str]) -> dict[str, str]:
    """Those of `explicit_keys` that change nothing in this run, with the reason: by the keys' own rules, and because
    the chosen engine, estimator or loss does not read them."""
    unread = dict(_not_read(config, explicit_keys)) if isinstance(config, PPOConfig) else {}
    return dict(sorted((unread | inert_by_rules(config, explicit_keys)).items()))


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
    estimator_keys = offered_settings(algorithm).keys() | {"lam", "adv_whitening"}
    named = {"adv_whitening": "whitening"}
    if not config.critic.enable:  # a critic learns discounted outcomes, whatever the estimator
        estimator_keys |= {"gamma"}
    for key, heirs in _HEIRS.items():
        takers = [heir for heir in heirs if heir not in keys and get_at(config, heir) == get_at(config, key)]
        reads_itself = key == "algorithm.lam" and not _takes(estimator, "lam_actor")
        if key in keys and not reads_itself and not {*takers} - inert_by_rules(config, takers).keys():
            yield key, f"no effect: neither {' nor '.join(heirs)} takes its value"
    for key in keys:
        section, _, name = key.rpartition(".")
        below_rollout = key.removeprefix("actor_rollout_ref.rollout.")
        if below_rollout != key and matches(below_rollout, special):
            if not matches(below_rollout, reads.get(shared.rollout.name, special)):
                yield key, f"no effect with rollout.name={shared.rollout.name}"
        elif section == "algorithm" and name in estimator_keys:
            if not _takes(estimator, named.get(name, name)):
                yield key, f"no effect: adv_estimator={estimator.name} does not read it"
        elif key == "critic.cliprange_value" and not _takes(VALUE_LOSSES[config.critic.value_loss], name):
            yield key, f"no effect with critic.value_loss={config.critic.value_loss}, which does not clip"
        elif key == "actor_rollout_ref.actor.loss_agg_mode" and (mode := loss.capability.aggregation):
            yield key, f"policy loss {loss.name} always aggregates as {mode}: this is for other terms, and the critic"
        elif key in _CLIPS and not _takes(loss, _CLIPS[key]):
            yield key, f"no effect: policy loss {loss.name} does not read it"


def _takes(entry: Entry, option: str) -> bool:
    return entry.takes_any or option in entry.parameters
