"""Advantages and returns by the estimator of `algorithm.adv_estimator`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from valor.algorithms import ADVANTAGES
from valor.collector.rollouts import correct
from valor.config import PPOConfig
from valor.data.batch import Batch, Episodes
from valor.trainer.advantage import (
    COMPONENTS,
    FROM_THE_RUN,
    LOG_PROBS,
    OFFERED_COLUMNS,
    always_learnt,
    compute_advantages,
    from_critic,
    offered_settings,
)
from valor.trainer.phases.base import Metrics, Phase, of_rows, option_mistakes, where_true
from valor.workers.probe import VALUE_ERROR

_READS_IF_THERE = """
    finish_reason reward_info episode reward_baselines progress reward_missing turn_ids values branch_mask
    branch_values bootstrap_values value_error
"""


class Advantages(Phase):
    """Advantages and returns of whole episodes; in the driver, so that groups and whitening see all samples."""

    name = "advantages"
    timer = "adv"
    reads = frozenset(("response_mask", "response_lengths", "token_level_scores", "token_level_rewards", "uid"))

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        algorithm, options = config.algorithm, ADVANTAGES[config.algorithm.adv_estimator].options
        imitates = config.actor_rollout_ref.actor.positive_nll_coef > 0
        self.with_positive = imitates and algorithm.reward_source != "critic"
        self.reads_if_there = frozenset(_READS_IF_THERE.split()) | (options & {*OFFERED_COLUMNS})
        added = ["advantages", "returns"]
        by_turn = algorithm.gae_unit == "turn" and "gae_unit" in options
        added += ["value_mask"] * (by_turn and not from_critic(algorithm))
        added += ["positive"] * self.with_positive
        self.adds = frozenset(added)

    @classmethod
    def contradictions(cls, config: PPOConfig) -> Iterator[str]:
        lines = [*_estimator(config), *_components(config)]
        algorithm, entry = config.algorithm, ADVANTAGES[config.algorithm.adv_estimator]
        options = {*entry.options, *(COMPONENTS if entry.capability.needs_components else ())}
        provided = {*offered_settings(algorithm), *FROM_THE_RUN}
        lines += option_mistakes(entry, "algorithm.adv_kwargs", algorithm.adv_kwargs, options, provided)
        yield from lines
        if entry.builtin and entry.capability.needs_critic and not lines:
            yield from _trial(config)

    def plan(self) -> str:
        entry, model = ADVANTAGES[self.config.algorithm.adv_estimator], self.config.reward.reward_model
        if not model.enable or model.gives != "steps":
            return f"by {entry.name}"
        by_token = "reward_on_masked" in entry.options or not entry.builtin
        return f"by {entry.name}, which takes rewards of steps {'each at its token' if by_token else 'as their sum'}"

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        metrics: Metrics = {}
        episodes = Episodes(batch)
        joined = episodes.joined()
        joined["advantages"], joined["returns"] = compute_advantages(
            joined, self.config.algorithm, self.config.reward.error_score, metrics
        )
        if self.with_positive:
            joined["positive"] = right_answers(joined)
        return of_rows(episodes, {name: joined[name] for name in self.adds if name in joined}), metrics


def right_answers(batch: Batch) -> Tensor:
    """[B] 1 where the grader calls the answer right, 0 where the reward is masked."""
    scores = batch["token_level_scores"].sum(-1)
    right = correct(Batch({"scores": scores}, {"reward_info": batch.objects["reward_info"]})).float()
    return right * (~batch["reward_missing"]).float() if "reward_missing" in batch else right


def _estimator(config: PPOConfig) -> Iterator[str]:
    """What the estimator needs from the run, and settings that it does not support."""
    algorithm, n = config.algorithm, config.actor_rollout_ref.rollout.n
    name, correction = f"algorithm.adv_estimator={algorithm.adv_estimator}", algorithm.rollout_correction
    entry = ADVANTAGES[algorithm.adv_estimator]
    needs, options = entry.capability, entry.options
    weighs_returns = entry.builtin and options >= set(LOG_PROBS)
    value_is_reward = from_critic(algorithm)
    wrong = {
        f"{name} needs a critic: set critic.enable=true, or an estimator that does without, such as grpo or rloo": (
            needs.needs_critic and not config.critic.enable
        ),
        f"{name} compares samples of one prompt: set actor_rollout_ref.rollout.n to at least {needs.min_group_size}, "
        f"it is {n}": n < needs.min_group_size
        and not ("singleton" in options and algorithm.singleton == "raw")
        and not config.distillation.replaces_advantages,
        f"{name} needs a pass of the actor over each batch, which bypass_mode leaves out: set "
        "algorithm.rollout_correction.bypass_mode=false": (
            correction.bypass_mode and (needs.needs_sum_pi_squared or weighs_returns)
        ),
        f"{name} weighs what follows a token itself, as algorithm.rollout_correction.rollout_is=sequence does: use "
        "rollout_is=token or prefix": weighs_returns and correction.rollout_is == "sequence",
        f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}: {algorithm.adv_estimator} compares with greedy "
        "responses of the same weights: set trainer_mode=sync": (
            needs.needs_greedy_baseline and config.trainer.v1.runs_ahead
        ),
        f"{name} compares with the graders' scores of greedy responses, and algorithm.reward_source=critic gives "
        "values: use another estimator": needs.needs_greedy_baseline and algorithm.reward_source == "critic",
        f"algorithm.truncated_responses=bootstrap is not for {name}: use gae": (
            algorithm.truncation_bootstrap and "bootstrap_mask" not in options
        ),
        "algorithm.gae_unit=turn trains the critic where turns begin; algorithm.truncated_responses=bootstrap, and "
        "algorithm.missing_reward=bootstrap or critic, read it at the end: use gae_unit=token or bilevel": (
            algorithm.gae_unit == "turn"
            and "gae_unit" in options
            and not value_is_reward
            and (algorithm.truncation_bootstrap or algorithm.reads_end_value)
        ),
        "algorithm.lam=auto reads the error of a critic in closed form, for advantages of tokens by gae: set "
        "critic.kind=probe, with gae and gae_unit=token, or lam to a number": config.measures_lambda
        and not (config.has_probe and algorithm.adv_estimator == "gae" and algorithm.gae_unit == "token"),
        "algorithm.lam=auto and adaptive_lam_alpha, lam_positions or reward_source=critic each say what advantages are "
        "made of: drop one": config.measures_lambda
        and (algorithm.adaptive_lam_alpha is not None or "lam_positions" in algorithm.adv_kwargs or value_is_reward),
        "algorithm.truncated_responses=bootstrap is for rewards by rule: drop it": (
            value_is_reward and algorithm.truncation_bootstrap
        ),
        "algorithm.reward_mask_flip_adv_when_masked=true acts after whitening: set algorithm.adv_whitening to batch or "
        "none": algorithm.flips_masked and algorithm.adv_whitening == "mini_batch",
    }
    return where_true(wrong)


def _components(config: PPOConfig) -> Iterator[str]:
    """Mistakes of an estimator that compares reward components (GDPO)."""
    algorithm, model = config.algorithm, config.reward.reward_model
    name = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    if not ADVANTAGES[algorithm.adv_estimator].capability.needs_components:
        return
    keys, weights = (algorithm.adv_kwargs.get(option) for option in COMPONENTS)
    reads = f"{name} reads reward components, which"
    if not isinstance(keys, list) or not keys:
        yield f"{name} needs algorithm.adv_kwargs.reward_keys: a list of components that the graders report"
    elif weights is not None and not _numbers_for(weights, keys):
        yield (
            f"algorithm.adv_kwargs.reward_weights={weights}: give a list with one number for each of reward_keys={keys}"
        )
    else:
        at = "add it to algorithm.adv_kwargs.reward_keys, or switch off what gives it"
        yield from (f"{reads} {key} is one of: {at}" for key in always_learnt(config) if key not in keys)
    wrong = {
        f"{reads} algorithm.use_kl_in_reward does not touch: use actor_rollout_ref.actor.use_kl_loss instead": (
            algorithm.use_kl_in_reward
        ),
        f"{reads} algorithm.reward_mask_ratio and algorithm.reward_binarize do not touch: drop them or take another "
        "estimator": algorithm.reward_mask_ratio > 0 or algorithm.reward_binarize,
        f"{reads} algorithm.reward_source=critic and algorithm.reward_noise do not touch: drop them or take another "
        "estimator": algorithm.reward_source == "critic" or algorithm.reward_noise > 0,
        f"{reads} reward.reward_model.gives=steps is none of: take another one": (
            model.enable and model.gives == "steps"
        ),
    }
    yield from where_true(wrong)


def _numbers_for(weights: Any, keys: list[str]) -> bool:
    numbers = isinstance(weights, list) and all(isinstance(weight, int | float) for weight in weights)
    return numbers and len(weights) == len(keys)


def _trial(config: PPOConfig) -> Iterator[str]:
    """Options that contradict each other, found by using them on one token. UserError: the estimator refuses them."""
    algorithm, x = config.algorithm, torch.ones(1, 1)
    columns = dict.fromkeys(("token_level_rewards", "response_mask", "values", *LOG_PROBS), x)
    columns |= {"turn_ids": x.long(), "bootstrap_values": x[0], VALUE_ERROR: x}
    try:
        compute_advantages(Batch(columns, {"uid": ["a"], "finish_reason": ["stop"]}), algorithm)
    except TypeError as error:  # a text where a number belongs
        yield f"algorithm.adv_kwargs={algorithm.adv_kwargs}: {error}"
