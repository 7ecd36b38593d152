"""Policy losses by name, what all of them share, and the clipped surrogate of PPO."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from valor.algorithms.reductions import (
    LOWEST_LOG_PROB,
    Denominator,
    aggregate_loss,
    keep_masked,
    log_ratio,
    loss_denominator,
    token_fraction,
)
from valor.algorithms.registry import POLICY_LOSSES, Entry, register_policy_loss
from valor.errors import UserError

Metrics = dict[str, Tensor]

# exp(±20) is finite in float32 and far outside any trust region: a runaway ratio cannot make the loss infinite.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class LossInputs:
    """What every policy loss gets, already 0 where the mask is 0.

    log_probs (with gradient), old_log_probs, advantages, response_mask: [B, T]; rollout_is_weights: [B, T] or None.
    sequence_lengths [B], of `aggregate_loss`, or None.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    rollout_is_weights: Tensor | None = None
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    num_tokens: Denominator = None
    num_sequences: Denominator = None
    sequence_lengths: Tensor | None = None

    def log_ratio(self, bound: float | None = LOG_RATIO_BOUND) -> Tensor:
        """log π/π_old [B, T], clamped to ±bound."""
        difference = log_ratio(self.log_probs, self.old_log_probs)
        return difference if bound is None else difference.clamp(-bound, bound)

    def aggregate(self, per_token: Tensor) -> Tensor:
        """The loss: per-token losses times the rollout's importance weights, over the global denominator."""
        if self.rollout_is_weights is not None:
            per_token = per_token * self.rollout_is_weights
        denominator = loss_denominator(self.loss_agg_mode, self.num_tokens, self.num_sequences)
        settings = (self.loss_agg_mode, self.loss_scale_factor, denominator, self.sequence_lengths)
        return aggregate_loss(per_token, self.response_mask, *settings)

    def fraction(self, hit: Tensor) -> Tensor:
        """Mean of `hit` [B, T] over the policy tokens, additive under the global denominator."""
        return token_fraction(hit, self.response_mask, self.num_tokens)


def policy_loss(
    name: str = "ppo",
    *,
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    num_tokens: Denominator = None,
    num_sequences: Denominator = None,
    sequence_lengths: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    turn_ids: Tensor | None = None,
    sequence_log_ratio: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Metrics]:
    """The loss `name` (a scalar with gradient to log_probs) and its metrics (detached scalars); inputs [B, T].

    old_log_probs: None when the batch gets a single update: the ratio is exactly 1.
    num_tokens, num_sequences: counts of the whole mini-batch when this is a part of it: losses, gradients and metrics
        of the parts then add up to those of the whole.
    sequence_lengths [B]: policy tokens of the sequence, where it has several rows and num_sequences counts sequences.
    rollout_is_weights [B, T]: importance weights of the rollout correction, multiplied onto each token's loss.
    turn_ids [B, T]: number of each policy token's turn, rising along a row; for losses that name it.
    sequence_log_ratio [B]: mean of log π/π_old over the policy tokens of the sequence, where it has several rows; for
        losses that name it.
    clip_ratio_*: reach those losses that clip; further options are the loss's own, an unknown one is a UserError.
    A loss that fixes its aggregation (`Capability.aggregation`) uses that in place of the default token-mean.
    """
    entry = POLICY_LOSSES[name]
    if log_probs.shape != response_mask.shape or advantages.shape != response_mask.shape:
        raise ValueError(
            f"log_probs {tuple(log_probs.shape)}, advantages {tuple(advantages.shape)} and response_mask "
            f"{tuple(response_mask.shape)} must have one shape"
        )
    inputs = LossInputs(
        log_probs=keep_masked(log_probs, response_mask).clamp(min=LOWEST_LOG_PROB),
        old_log_probs=keep_masked(log_probs.detach() if old_log_probs is None else old_log_probs, response_mask),
        advantages=keep_masked(advantages, response_mask),
        response_mask=response_mask,
        rollout_is_weights=None if rollout_is_weights is None else keep_masked(rollout_is_weights, response_mask),
        loss_agg_mode=aggregation(entry, loss_agg_mode),
        loss_scale_factor=loss_scale_factor,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        sequence_lengths=sequence_lengths,
    )
    common: dict[str, Any] = {"inputs": inputs, "turn_ids": turn_ids, "sequence_log_ratio": sequence_log_ratio}
    common |= {"clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high, "clip_ratio_c": clip_ratio_c}
    loss, metrics = entry.call(common, options)
    return loss, {key: torch.as_tensor(value).detach() for key, value in metrics.items()}


def aggregation(entry: Entry, requested: str) -> str:
    """The loss_agg_mode of a policy loss: `requested`, or its own in place of the default. UserError: another one."""
    fixed = entry.capability.aggregation
    if fixed is None or requested == fixed:
        return requested
    if requested != "token-mean":
        raise UserError(f"policy loss {entry.name} always aggregates as {fixed}: remove loss_agg_mode={requested}")
    return fixed


def clip_bounds(clip_ratio_low: float, clip_ratio_high: float) -> tuple[float, float]:
    """The interval [1 − low, 1 + high] in which the ratio may move."""
    if clip_ratio_low < 0 or clip_ratio_high < 0:
        raise UserError("clip_ratio_low and clip_ratio_high must not be negative")
    return 1.0 - clip_ratio_low, 1.0 + clip_ratio_high


def clipped(inputs: LossInputs, ratio: Tensor, clip_ratio_low: float, clip_ratio_high: float) -> tuple[Tensor, Tensor]:
    """max(−Aρ, −A·clip(ρ, 1−low, 1+high)) [B, T], and where the clip binds."""
    unclipped = -inputs.advantages * ratio
    bounded = -inputs.advantages * ratio.clamp(*clip_bounds(clip_ratio_low, clip_ratio_high))
    return torch.maximum(unclipped, bounded), bounded > unclipped


@register_policy_loss("vanilla", paper="https://arxiv.org/abs/1707.06347")
@register_policy_loss("ppo", paper="https://arxiv.org/abs/1707.06347")
def ppo(
    inputs: LossInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float | None = 3.0
) -> tuple[Tensor, Metrics]:
    """L = max(−Aρ, −A·clip(ρ, 1−low, 1+high)), and for A < 0 at most −A·c; ρ = π/π_old.

    PPO (https://arxiv.org/abs/1707.06347), asymmetric "clip higher" (DAPO, https://arxiv.org/abs/2503.14476), dual
    clip (https://arxiv.org/abs/1912.09729): c = clip_ratio_c > 1, None for no bound.
    Metrics: pg_clipfrac (tokens where the clip binds), pg_clipfrac_lower (where the dual clip binds), ppo_kl.
    """
    if clip_ratio_c is not None and clip_ratio_c <= 1.0:
        raise UserError(f"clip_ratio_c must be greater than 1, got {clip_ratio_c}; null switches dual clip off")
    advantages, log_ratio = inputs.advantages, inputs.log_ratio()
    loss, binds = clipped(inputs, log_ratio.exp(), clip_ratio_low, clip_ratio_high)
    lower_hit = torch.zeros_like(loss)
    if clip_ratio_c is not None:
        ceiling = -advantages * clip_ratio_c
        lower_hit = (loss > ceiling) & (advantages < 0)
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    metrics = {
        "pg_clipfrac": inputs.fraction(binds),
        "ppo_kl": inputs.fraction(-log_ratio),
        "pg_clipfrac_lower": inputs.fraction(lower_hit),
    }
    return inputs.aggregate(loss), metrics
