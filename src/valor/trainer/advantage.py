"""Advantages of a batch: where the configuration's `algorithm` section meets the estimators."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from valor import algorithms
from valor.algorithms.scan import credit_policy_tokens, returns_to_go
from valor.algorithms.turns import Turns
from valor.collector.inputs import RunInputs
from valor.config import AlgorithmConfig, PPOConfig
from valor.data.batch import Batch
from valor.errors import UserError
from valor.rewards.worker import NOT_GRADED, Sample
from valor.trainer.old_log_probs import OldLogProbs
from valor.workers.probe import VALUE_ERROR

LOG_PROBS = ("old_log_probs", "rollout_log_probs")
# What an estimator may name beyond the common inputs, where the run has it.
OFFERED_COLUMNS = (*LOG_PROBS, "sum_pi_squared", "rollout_is_weights", "turn_ids")
_OTHERS = ("component_scores", "component_weights", "bootstrap_mask", "bootstrap_values", "report")
FROM_THE_RUN = (*OFFERED_COLUMNS, *_OTHERS)
CUT_OFF = ("length", "turns")  # why a response ended at a limit
COMPONENTS = ("reward_keys", "reward_weights")  # in adv_kwargs, of an estimator that compares reward components


def compute_advantages(
    batch: Batch, config: AlgorithmConfig, error_score: float = 0.0, metrics: dict[str, float] | None = None
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] by `algorithm.adv_estimator`, of a batch whose rows are whole episodes.

    The estimator gets those of the batch's columns and of the section's settings that it names. `error_score`: what a
    sample whose grader failed has in each reward component. `metrics` gains what the estimator reports. Where
    `branch_mask` [B, T] is 1, `branch_values` are the values, and the critic's targets. Beside an estimator without a
    critic the returns of a batch with `values` are those that a critic learns. With `gae_unit=turn` the batch
    gains `value_mask` [B, T]: 1 at the first policy token of each turn, where alone the critic has a target.
    """
    tensors, name, inputs = batch.tensors, config.adv_estimator, _inputs(batch, config, error_score, metrics)
    whitening = {"whitening": offered_settings(config)["whitening"]}
    if from_critic(config):
        return algorithms.critic_advantages(inputs["values"], inputs["response_mask"], **whitening)
    if inputs.get("gae_unit") == "turn":
        batch["value_mask"] = Turns(inputs.get("turn_ids"), inputs["response_mask"]).starts.float()
    if "progress" in batch:
        progress = {"progress": tensors["progress"]}
        advantages, returns = algorithms.advantages_with_progress(name, **{**inputs, **progress, **whitening})
    elif "reward_missing" in batch:
        how: dict[str, Any] = {"missing_reward": config.missing_reward, "flip": config.reward_mask_flip_adv_when_masked}
        how["missing"] = tensors["reward_missing"]
        advantages, returns, _ = algorithms.advantages_with_missing_rewards(name, **{**inputs, **how, **whitening})
    else:
        advantages, returns = algorithms.compute_advantages(name, **inputs)
    entry = algorithms.ADVANTAGES[name]
    if inputs["values"] is not None and entry.builtin and not entry.capability.needs_critic:
        returns = _outcomes(batch, config)
    branched = tensors.get("branch_mask")
    return advantages, returns if branched is None else tensors["branch_values"].where(branched > 0, returns)


def _least_error_lambda(
    batch: Batch, values: Tensor, gamma: float, cut_off: Tensor | None, report: Callable[[str, float], None]
) -> float:
    """λ for this batch; responses whose end (`cut_off` [B]) or reward is not known say nothing about it."""
    mask = batch["response_mask"] if cut_off is None else batch["response_mask"] * ~cut_off[:, None]
    if "reward_missing" in batch:
        mask = mask * ~batch["reward_missing"][:, None]
    rewards = credit_policy_tokens(batch["token_level_rewards"], mask, "carry")
    lam, bias, variance = algorithms.least_error_lambda(rewards, values, batch[VALUE_ERROR], mask, gamma)
    report("critic/lambda", lam)
    report("critic/lambda/bias_squared", bias)
    report("critic/lambda/variance", variance)
    return lam


def _outcomes(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """[B, T] rewards to go: what a critic learns beside an estimator that compares samples and reads no values."""
    rewards, mask = batch["token_level_rewards"], batch["response_mask"]
    if "reward_missing" in batch:
        lost = batch["reward_missing"]
        rewards = algorithms.apply_missing_reward(rewards, mask, lost, config.missing_reward, batch["values"])
    return returns_to_go(rewards, mask, config.gamma)


def _inputs(
    batch: Batch, config: AlgorithmConfig, error_score: float, metrics: dict[str, float] | None
) -> dict[str, Any]:
    """Keyword arguments of the estimator: the common inputs, what it names of columns and settings, and adv_kwargs."""
    tensors, entry, options = batch.tensors, algorithms.ADVANTAGES[config.adv_estimator], {**config.adv_kwargs}
    offered: dict[str, Any] = offered_settings(config) | {"report": ({} if metrics is None else metrics).__setitem__}
    by_token = {**offered, **options}["gae_unit"] == "token" and "gae_unit" in entry.options
    columns = [name for name in OFFERED_COLUMNS if name in tensors and not (by_token and name == "turn_ids")]
    offered |= {name: tensors[name] for name in columns if name in entry.options}
    values = tensors.get("values")
    if values is not None and "branch_mask" in batch:
        values = tensors["branch_values"].where(tensors["branch_mask"] > 0, values)
    if config.truncation_bootstrap:
        cut_off = [reason in CUT_OFF for reason in batch.objects["finish_reason"]]
        offered |= {"bootstrap_mask": torch.tensor(cut_off), "bootstrap_values": tensors["bootstrap_values"]}
    if config.lam_actor == "auto" and values is not None:
        cut_off = offered.get("bootstrap_mask")
        offered["lam_actor"] = _least_error_lambda(batch, values, config.gamma, cut_off, offered["report"])
    if entry.capability.needs_components:
        keys, weights = (options.pop(option, None) for option in COMPONENTS)
        offered["component_scores"] = component_scores(batch.objects["reward_info"], keys, error_score)
        offered["component_weights"] = dict(zip(keys, weights, strict=True)) if weights else None
    return {
        "rewards": tensors["token_level_rewards"],
        "response_mask": tensors["response_mask"],
        "values": values,
        "group_ids": batch.objects["uid"],
        "reward_baselines": tensors.get("reward_baselines"),
        "gamma": config.gamma,
        "lam": 1.0 if config.lam == "auto" else config.lam,
        **{k: v for k, v in offered.items() if k in entry.options},
        **options,
    }


def from_critic(config: AlgorithmConfig) -> bool:
    """Whether the advantage is V(last) - V: the critic's value is the reward, and the estimator would compare it with
    the critic's values again. Estimators without a critic treat that reward as any score."""
    return config.reward_source == "critic" and algorithms.ADVANTAGES[config.adv_estimator].capability.needs_critic


def targets_by_ranks(config: PPOConfig) -> dict[str, Any] | None:
    """Options of GAE by which the critic's ranks make their own targets, in the one update of a batch.

    None where that is impossible: returns that depend on more than a row's scores and values, rows left out of the
    update, several updates or critics; or useless: a critic with processes apart from the actor's trains while the
    actor does, which would have to wait for values that come with the update.
    """
    algorithm, critic = config.algorithm, config.critic
    if (
        not config.trains_critic
        or critic.target != "absolute"
        or critic.ensemble_size > 1
        or config.replays
        or config.updates_per_step(critic) > 1
        or (critic.strategy == "megatron" and critic.megatron.pipeline_model_parallel_size > 1)
        or algorithm.adv_estimator != "gae"
        or algorithm.gae_unit != "token"
        or algorithm.use_kl_in_reward
        or config.distillation.as_reward
        or algorithm.reward_source == "critic"
        or algorithm.reward_mask_ratio > 0
        or algorithm.truncated_responses != "end"
        or algorithm.branch_values.share > 0
        or OldLogProbs(config).correct_batch
        or any(("critic" in pool.roles) != ("actor" in pool.roles) for pool in config.pools.values())
    ):
        return None
    settings = {"gamma": algorithm.gamma, "lam": algorithm.lam, **offered_settings(algorithm), **algorithm.adv_kwargs}
    if algorithm.lam_actor == "auto":  # the targets have a lambda of their own
        settings |= {"lam": 1.0, "lam_actor": None}
    known = algorithms.ADVANTAGES["gae"].parameters
    return {name: value for name, value in settings.items() if name in known} | {"whitening": "none"}


def offered_settings(config: AlgorithmConfig) -> dict[str, Any]:
    """The section's settings under the names that estimators give them."""
    names = {"lam_actor", "lam_critic", "adaptive_lam_alpha", "norm_adv_by_std_in_grpo", "singleton", "gae_unit"}
    if config.gae_unit != "token":
        names |= {"gamma_turn", "lam_turn"}
    return {**config.model_dump(include=names), "whitening": "batch" if config.adv_whitening == "batch" else "none"}


def component_scores(
    reward_info: Sequence[Mapping[str, Any]], keys: Sequence[str], error_score: float
) -> dict[str, Tensor]:
    """Each named reward component of all samples, [B]. A sample whose grader failed has `error_score` in each.

    UserError: the graders report no such component, or it is no number.
    """
    out: dict[str, Tensor] = {}
    for key in keys:
        values = [error_score if NOT_GRADED in info else info.get(key) for info in reward_info]
        if not all(isinstance(v, bool | int | float) for v in values):
            known = ", ".join(sorted({name for info in reward_info for name in info} - {NOT_GRADED})) or "none"
            raise UserError(
                f"algorithm.adv_kwargs.reward_keys: '{key}' is not a number that every sample's grader reports "
                f"(components are {known}): let the grader return it beside score"
                + ", under a name of its own"
                * (key == "score")
            )
        out[key] = torch.tensor(values, dtype=torch.float32)
    return out


def always_learnt(config: PPOConfig) -> list[str]:
    """The reward components that the run adds to those of the graders, and that are there to be learnt from."""
    reward = config.reward
    punishes_length = reward.reward_manager.name == "dapo" and reward.reward_kwargs.overlong_buffer_cfg.enable
    return ["rm_score"] * reward.reward_model.scores + ["overlong_reward"] * punishes_length


def check_components(config: PPOConfig, inputs: RunInputs) -> None:
    """UserError: a component that the estimator compares is missing in the grade of an empty response to one prompt of
    each source. A grader that fails on that is not judged."""
    added = always_learnt(config)
    added += ["acc", "rule_score"] * bool(added)
    keys = [key for key in config.algorithm.adv_kwargs.get(COMPONENTS[0]) or () if key not in added]
    if not keys or inputs.agents is not None or config.reward.reward_model.replaces_rule:
        return
    rows = {row.data_source: row for row in inputs.train}.values()
    results = inputs.rewards.score([Sample(row.data_source, "", row.ground_truth, row.extra_info) for row in rows])
    if grades := [result.components for result in results if result.error is None]:
        component_scores(grades, keys, config.reward.error_score)
