"""Rewards before they become advantages: binarized, shortened, thinned out, replaced by the critic's own value.

Shapes: rewards, values, masks [B, T]; per-trajectory flags and scores [B]. Order in a step: binarize → KL penalty →
missing rewards → advantages.
"""

import math
from typing import Any

import torch
from torch import Tensor

from valor.algorithms.advantages import compute_advantages
from valor.algorithms.groups import GroupIds, Groups
from valor.algorithms.reductions import keep_masked, last_token, masked_whiten
from valor.algorithms.registry import ADVANTAGES, choose
from valor.errors import UserError

REWARD_MASK_TYPES: tuple[str, ...] = ("fixed_ratio", "bernoulli")
REWARD_MASK_LEVELS: tuple[str, ...] = ("trajectory", "group")
MISSING_REWARD: tuple[str, ...] = ("zero", "bootstrap", "exclude", "critic")


def place_at_end(scores: Tensor, response_mask: Tensor) -> Tensor:
    """[B, T] rewards that hold scores [B] at the last policy token of each row (nowhere in a row without any)."""
    last = last_token(response_mask).unsqueeze(1)
    score = keep_masked(scores.float().unsqueeze(1), response_mask.gather(1, last))
    return torch.zeros_like(response_mask, dtype=torch.float32).scatter_(1, last, score)


def value_at_end(values: Tensor, response_mask: Tensor) -> Tensor:
    """[B] value at the last policy token, i.e. of the state before it; 0 in a row without any."""
    return keep_masked(values, response_mask).gather(1, last_token(response_mask).unsqueeze(1)).squeeze(1)


def binarize(scores: Tensor, threshold: float) -> Tensor:
    """[B] float32 1 where the outcome score exceeds the threshold, else 0."""
    return (scores > threshold).float()


def overlong_penalty(
    response_lengths: Tensor, *, max_response_length: int, buffer_length: int, penalty_factor: float = 1.0
) -> Tensor:
    """[B] soft punishment of length (DAPO, https://arxiv.org/abs/2503.14476): 0 up to max − buffer tokens, then linear
    down to −penalty_factor at max, and on beyond; to be added to the outcome score."""
    if not 0 < buffer_length <= max_response_length:
        raise UserError(
            f"overlong buffer_length={buffer_length} must be between 1 and the longest response, {max_response_length}"
        )
    excess = response_lengths.float() - (max_response_length - buffer_length)
    return -(excess / buffer_length * penalty_factor).clamp(min=0.0)


def draw_reward_mask(
    size: int,
    ratio: float,
    *,
    generator: torch.Generator,
    kind: str = "fixed_ratio",
    level: str = "trajectory",
    group_ids: GroupIds | None = None,
    remainder: float = 0.0,
) -> tuple[Tensor, float]:
    """[B] bool, True where the reward is taken away, and the remainder to hand to the next draw.

    fixed_ratio: exactly ⌊ratio · units + remainder⌋ of them, at random; the fraction that is cut off is carried, so
    that over steps the ratio is exact however small the batch. bernoulli: each with probability `ratio`.
    level: the unit is a trajectory, or a whole group of samples of one prompt.
    """
    if not 0.0 <= ratio <= 1.0:
        raise UserError(f"reward_mask_ratio must be between 0 and 1, got {ratio}")
    choose(kind, REWARD_MASK_TYPES, "reward_mask_type")
    by_group = choose(level, REWARD_MASK_LEVELS, "reward_mask_level") == "group"
    groups = Groups(group_ids, size, torch.device("cpu")) if by_group else None
    units = size if groups is None else groups.number
    if kind == "bernoulli":
        missing = torch.rand(units, generator=generator) < ratio
    else:
        exact = ratio * units + remainder
        number = min(math.floor(exact + 1e-9), units)
        remainder = max(exact - number, 0.0)
        missing = torch.zeros(units, dtype=torch.bool)
        missing[torch.randperm(units, generator=generator)[:number]] = True
    return (missing if groups is None else groups.spread(missing)), remainder


def apply_missing_reward(
    rewards: Tensor, response_mask: Tensor, missing: Tensor, policy: str, values: Tensor | None = None
) -> Tensor:
    """[B, T] rewards with the rows of `missing` [B] emptied (KL penalty included) and refilled as `policy` says.

    zero, exclude: nothing. bootstrap, critic: the value at the last policy token, as reward there.
    """
    choose(policy, MISSING_REWARD, "missing_reward")
    emptied = rewards.masked_fill(missing.bool().unsqueeze(1), 0.0)
    if policy in ("zero", "exclude"):
        return emptied
    end_value = value_at_end(_require(values, policy), response_mask) * missing.float()
    return emptied + place_at_end(end_value, response_mask)


def critic_advantages(values: Tensor, response_mask: Tensor, *, whitening: str = "batch") -> tuple[Tensor, Tensor]:
    """A_t = V(last) − V_t, whitened, and returns = A + V = V(last): the critic's final opinion as the only reward.

    GAE with that reward would start from a last TD error of 0 and, for λ < 1, forget it along the response.
    """
    end_value = value_at_end(values, response_mask).unsqueeze(1)
    advantages = keep_masked(end_value - values, response_mask)
    returns = keep_masked(end_value.expand_as(values), response_mask)
    return masked_whiten(advantages, response_mask, scope=whitening), returns


def advantages_with_missing_rewards(
    name: str,
    *,
    rewards: Tensor,
    response_mask: Tensor,
    missing: Tensor,
    missing_reward: str = "zero",
    flip: bool = False,
    values: Tensor | None = None,
    whitening: str = "batch",
    **inputs: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages, returns and the loss mask [B, T] when some trajectories have lost their reward.

    zero: their reward is 0. bootstrap: V(last) is their reward, through the estimator, and the value of their end, if
    they were cut off (`bootstrap_mask`). critic: their advantages are V(last) − V_t whatever λ. exclude: they take no
    part in any statistic and their loss mask is 0.
    flip: advantages × −1 in these rows, after whitening: with "zero" they end in δ = −V, which pushes high-value
    trajectories down, and the flip turns the push around. Other inputs as in `compute_advantages`.
    """
    rewards = apply_missing_reward(rewards, response_mask, missing, missing_reward, values)
    excluded = missing.bool() if missing_reward == "exclude" else torch.zeros_like(missing, dtype=torch.bool)
    loss_mask = response_mask.masked_fill(excluded.unsqueeze(1), 0.0)
    by_critic, whitens = missing_reward == "critic", "whitening" in ADVANTAGES[name].options
    if whitens:  # two kinds of advantages are whitened together
        inputs["whitening"] = "none" if by_critic else whitening
    if missing_reward == "bootstrap" and inputs.get("bootstrap_mask") is not None:
        inputs["bootstrap_mask"] = inputs["bootstrap_mask"].bool() & ~missing.bool()
    advantages, returns = compute_advantages(
        name, rewards=rewards, response_mask=response_mask, values=values, sample_mask=~excluded, **inputs
    )
    if by_critic:
        rows = missing.bool().unsqueeze(1)
        others = critic_advantages(_require(values, "critic"), response_mask, whitening="none")
        advantages, returns = others[0].where(rows, advantages), others[1].where(rows, returns)
        if whitens:
            advantages = masked_whiten(advantages, response_mask, scope=whitening)
    if flip:
        advantages = torch.where(missing.bool().unsqueeze(1), -advantages, advantages)
    return advantages, returns, loss_mask


def _require(values: Tensor | None, policy: str) -> Tensor:
    if values is None:
        raise UserError(f"missing_reward={policy} needs the critic's values; use zero or exclude without a critic")
    return values
