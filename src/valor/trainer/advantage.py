"""Advantages of a batch: where the configuration's `algorithm` section meets the estimators."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from valor import algorithms
from valor.algorithms.turns import Turns
from valor.collector.inputs import RunInputs
from valor.collector.rollouts import correct
from valor.config import AlgorithmConfig, PPOConfig
from valor.data.batch import Batch
from valor.errors import UserError
from valor.rewards.worker import Sample
from valor.trainer.old_log_probs import OldLogProbs

# What an estimator may name beyond the common inputs, where the run has it.
OFFERED_COLUMNS = ("old_log_probs", "rollout_log_probs", "sum_pi_squared", "rollout_is_weights", "turn_ids")
FROM_THE_RUN = (
    *OFFERED_COLUMNS,
    "component_scores",
    "component_weights",
    "bootstrap_mask",
    "bootstrap_values",
    "report",
)
COMPONENTS = ("reward_keys", "reward_weights")  # in adv_kwargs, of an estimator that compares reward components


def compute_advantages(
    batch: Batch, config: AlgorithmConfig, error_score: float = 0.0, metrics: dict[str, float] | None = None
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] by `algorithm.adv_estimator`, of a batch whose rows are whole episodes.

    The estimator gets those of the batch's columns and of the section's settings that it names. `error_score`: what a
    sample whose grader failed has in each reward component. `metrics` gains what the estimator reports. Where
    `branch_mask` [B, T] is 1, `branch_values` are the values, and the critic's targets. With `quantiles` [B, T, K] the
    batch gains `quantile_returns` [B, T, K]. With `gae_unit=turn` the batch gains `value_mask` [B, T]: 1 at the first
    policy token of each turn, where alone the critic has a target.
    """
    tensors = batch.tensors
    values, branched = tensors.get("values"), tensors.get("branch_mask")
    if values is not None and branched is not None:
        values = tensors["branch_values"].where(branched > 0, values)
    offered: dict[str, Any] = offered_settings(config) | {"report": ({} if metrics is None else metrics).__setitem__}
    name, options = config.adv_estimator, {**config.adv_kwargs}
    entry = algorithms.ADVANTAGES[name]
    read = [column for column in OFFERED_COLUMNS if column in tensors and column in entry.options]
    if {**offered, **options}.get("gae_unit") == "token" and "gae_unit" in entry.options:
        read = [column for column in read if column != "turn_ids"]
    offered |= {column: tensors[column] for column in read}
    if config.truncation_bootstrap:
        cut_off = torch.tensor([reason in ("length", "turns") for reason in batch.objects["finish_reason"]])
        offered |= {"bootstrap_mask": cut_off, "bootstrap_values": tensors["bootstrap_values"]}
    if entry.capability.needs_components:
        keys, weights = (options.pop(option, None) for option in COMPONENTS)
        offered["component_scores"] = component_scores(batch.objects["reward_info"], keys, error_score)
        offered["component_weights"] = dict(zip(keys, weights, strict=True)) if weights else None
    common: dict[str, Any] = {
        "rewards": tensors["token_level_rewards"],
        "response_mask": tensors["response_mask"],
        "values": values,
        "group_ids": batch.objects["uid"],
        "reward_baselines": tensors.get("reward_baselines"),
        "gamma": config.gamma,
        "lam": config.lam,
        **{k: v for k, v in offered.items() if k in entry.options},
        **options,
    }
    if common.get("gae_unit") == "turn" and not from_critic(config):
        batch["value_mask"] = Turns(common.get("turn_ids"), common["response_mask"]).starts.float()
    if "quantiles" in batch:
        inputs = {**common, **({"whitening": "none"} if "whitening" in entry.options else {})}
        batch["quantile_returns"] = algorithms.quantile_targets(name, quantiles=tensors["quantiles"], **inputs)
    if from_critic(config):
        return algorithms.critic_advantages(common["values"], common["response_mask"], whitening=offered["whitening"])
    if "progress" in batch or "reward_missing" not in batch:
        if "progress" in batch:
            common |= {"progress": tensors["progress"], "whitening": offered["whitening"]}
        compute = algorithms.advantages_with_progress if "progress" in batch else algorithms.compute_advantages
        advantages, returns = compute(name, **common)
        return advantages, returns if branched is None else tensors["branch_values"].where(branched > 0, returns)
    advantages, returns, _ = algorithms.advantages_with_missing_rewards(
        name,
        missing=tensors["reward_missing"],
        missing_reward=config.missing_reward,
        flip=config.reward_mask_flip_adv_when_masked,
        **{**common, "whitening": offered["whitening"]},
    )
    return advantages, returns


def right_answers(batch: Batch) -> Tensor:
    """[B] 1 where the grader calls the answer right; nobody is told so where the reward is missing."""
    scores = batch["token_level_scores"].sum(-1)
    right = correct(Batch({"scores": scores}, {"reward_info": batch.objects["reward_info"]})).float()
    return right * (~batch["reward_missing"]).float() if "reward_missing" in batch else right


def from_critic(config: AlgorithmConfig) -> bool:
    """Whether V(last) - V is the advantage: the critic's value is the reward, and the estimator would compare it with
    the critic's values again. Estimators that do without a critic take the value as they take any score."""
    return config.reward_source == "critic" and algorithms.ADVANTAGES[config.adv_estimator].capability.needs_critic


def own_targets(config: PPOConfig) -> tuple[str, dict[str, Any]] | None:
    """Name and options of the estimator by which the critic's ranks can make their targets themselves, in the one
    update that a batch has: a row's returns follow from its scores and the critic's values of it. None where they need
    more, not all rows are trained on, there are several updates or critics, or the critic has processes without the
    actor: those train while the actor does, which would have to wait for values that come with an update."""
    algorithm, critic = config.algorithm, config.critic
    if not critic.enable or critic.freeze or critic.ensemble_size > 1:
        return None
    updates = math.ceil(config.data.train_batch_size / critic.ppo_mini_batch_size) * critic.ppo_epochs
    more = (
        any(("critic" in pool.roles) != ("actor" in pool.roles) for pool in config.pools.values()),
        updates > 1 or (critic.strategy == "megatron" and critic.megatron.pipeline_model_parallel_size > 1),
        algorithm.adv_estimator != "gae" or algorithm.gae_unit != "token",
        algorithm.use_kl_in_reward or algorithm.reward_source == "critic" or algorithm.reward_mask_ratio > 0,
        algorithm.truncation_bootstrap or algorithm.branch_values.share > 0 or config.learns_quantiles,
        algorithm.use_pf_ppo or OldLogProbs.of(config).correct_batch,
    )
    if any(more):
        return None
    settings = {"gamma": algorithm.gamma, "lam": algorithm.lam, **offered_settings(algorithm), **algorithm.adv_kwargs}
    known = algorithms.ADVANTAGES["gae"].parameters
    return "gae", {name: value for name, value in settings.items() if name in known} | {"whitening": "none"}


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
        values = [info.get(key, None if info else error_score) for info in reward_info]
        reported = any(key in info for info in reward_info)
        if not reported or not all(isinstance(v, bool | int | float) for v in values):
            known = ", ".join(sorted({name for info in reward_info for name in info})) or "none"
            raise UserError(
                f"algorithm.adv_kwargs.reward_keys: '{key}' is not a number that every sample's grader reports "
                f"(components are {known}): let the grader return it beside score"
            )
        out[key] = torch.tensor(values, dtype=torch.float32)
    return out


def check_components(config: PPOConfig, inputs: RunInputs) -> None:
    """UserError: a component that the estimator compares is not in the grade of an empty response.

    One prompt of each source is tried. Where the grader fails on it, nothing is known yet.
    """
    keys = config.algorithm.adv_kwargs.get(COMPONENTS[0]) or ()
    if not keys or inputs.agents is not None or config.reward.reward_model.replaces_rule:
        return
    first = {row.data_source: row for row in inputs.train}
    samples = [Sample(row.data_source, "", row.ground_truth, row.extra_info) for row in first.values()]
    if found := [result.components for result in inputs.rewards.score(samples) if result.error is None]:
        component_scores(found, keys, config.reward.error_score)
