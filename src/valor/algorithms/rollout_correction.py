"""Correcting for the gap between the engine that sampled and the model that trains: importance weights, rejection.

x = log π_train − log π_rollout per token. Decoupled use: π_train is the policy before the update (old_log_probs);
bypass use: the policy being trained. Nothing here carries a gradient. Truncated importance sampling:
https://fengyao.notion.site/off-policy-rl; IcePop: https://arxiv.org/abs/2510.18855.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from valor.algorithms.mismatch import importance_metrics, rejection_metrics
from valor.algorithms.ppo import LOG_RATIO_BOUND
from valor.algorithms.reductions import keep_masked, log_ratio, masked_mean, masked_sum
from valor.algorithms.registry import choose
from valor.errors import UserError

ROLLOUT_IS: tuple[str, ...] = ("token", "prefix", "sequence")
ROLLOUT_RS: tuple[str, ...] = (
    *(f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean") for kind in ("k1", "k2", "k3")),
    *("seq_max_k2", "seq_max_k3"),
)
Threshold = float | str


@dataclass(frozen=True)
class RolloutCorrection:
    """weights [B, T] for the policy loss (None: no importance sampling), the mask that is left, batch metrics."""

    weights: Tensor | None
    response_mask: Tensor
    metrics: dict[str, float]


@torch.no_grad()
def rollout_correction(
    *,
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: Threshold = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: Threshold | None = None,
) -> RolloutCorrection:
    """Importance weights and rejection mask from the two log-probabilities [B, T].

    The weights come from the full mask; the rejected tokens leave the returned mask, from which loss denominators must
    be counted.
    """
    x = keep_masked(log_ratio(log_probs, rollout_log_probs), response_mask)
    weights, accepted, metrics = None, response_mask, {}
    if rollout_is is not None:
        weights, more = importance_weights(
            x, response_mask, rollout_is, rollout_is_threshold, batch_normalize=rollout_is_batch_normalize
        )
        metrics |= more
    if rollout_rs is not None:
        if rollout_rs_threshold is None:
            raise UserError(f"rollout_rs={rollout_rs} needs rollout_rs_threshold")
        accepted, more = rejection_mask(x, response_mask, rollout_rs, rollout_rs_threshold)
        metrics |= more
    return RolloutCorrection(weights, accepted, metrics)


def importance_weights(
    log_ratio: Tensor, response_mask: Tensor, level: str, threshold: Threshold, *, batch_normalize: bool = False
) -> tuple[Tensor, dict[str, float]]:
    """w = e^x per token, e^Σx over the tokens up to it (prefix), or over all of the sequence for each of its tokens;
    |exponent| ≤ 20; [B, T], 0 at masked positions.

    threshold: a number truncates from above (TIS); "lo_hi" sets weights outside of [lo, hi] to 0 (IcePop).
    batch_normalize: divides by the mean over tokens (token) or over sequences (prefix, sequence).
    """
    choose(level, ROLLOUT_IS, "rollout_is")
    low, high = parse_bounds(threshold, "rollout_is_threshold")
    if level == "prefix":
        exponent = log_ratio.cumsum(1)
    else:
        exponent = log_ratio if level == "token" else masked_sum(log_ratio, response_mask, -1).unsqueeze(1)
    raw = keep_masked(exponent.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().expand_as(log_ratio), response_mask)
    weights = raw.clamp(max=high) if low is None else raw.masked_fill((raw < low) | (raw > high), 0.0)
    norm = 1.0
    if batch_normalize:
        if level == "token":
            mean = masked_mean(weights, response_mask)
        else:
            mean = masked_mean(masked_mean(weights, response_mask, -1), response_mask.bool().any(-1))
        norm = mean.item() if mean > 1e-8 else 1.0
        weights = weights / norm
    return weights, importance_metrics(raw, weights, response_mask, low, high, norm)


def rejection_mask(
    log_ratio: Tensor, response_mask: Tensor, options: str, thresholds: Threshold
) -> tuple[Tensor, dict[str, float]]:
    """[B, T] response_mask without the tokens (token_*) or the whole sequences (seq_*) outside the bounds.

    options: comma-separated names, all of which must accept; LEVEL_KIND with level token, seq_sum, seq_mean, seq_max
    and kind k1 = −x, k2 = x²/2, k3 = e^x − 1 − x. thresholds: one per option, comma-separated, or one for all;
    k1 takes "lo_hi", bounds on π_rollout/π_train, its log kept between log lo and log hi; k2, k3 an upper bound.
    """
    names = [choose(name.strip(), ROLLOUT_RS, "rollout_rs option") for name in options.split(",")]
    limits = [part.strip() for part in str(thresholds).split(",")]
    if len(limits) == 1:
        limits = limits * len(names)
    if len(limits) != len(names):
        raise UserError(f"rollout_rs names {len(names)} options but rollout_rs_threshold {len(limits)} bounds")
    accepted = response_mask.bool()
    metrics: dict[str, float] = {}
    for name, limit in zip(names, limits, strict=True):
        statistic = _statistic(log_ratio, response_mask, name)
        low, high = _rejection_bounds(name, limit)
        inside = (statistic >= low) & (statistic <= high)
        metrics |= rejection_metrics(name, statistic, inside, response_mask)
        accepted = accepted & inside
    metrics |= rejection_metrics("", None, accepted, response_mask)
    return response_mask * accepted, metrics


def _statistic(log_ratio: Tensor, response_mask: Tensor, name: str) -> Tensor:
    """[B, T] (token_*) or [B, 1] (seq_*) divergence that an option looks at."""
    level, kind = name.rsplit("_", 1)
    x = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    token = {"k1": -x, "k2": 0.5 * x.square(), "k3": x.exp() - 1.0 - x}[kind]
    if level == "token":
        return token
    if level == "seq_max":
        return keep_masked(token, response_mask).amax(-1, keepdim=True)
    reduce = masked_sum if level == "seq_sum" else masked_mean
    return reduce(token, response_mask, -1).unsqueeze(1)


def _rejection_bounds(name: str, limit: str) -> tuple[float, float]:
    low, high = parse_bounds(limit, "rollout_rs_threshold")
    if name.endswith("k1"):
        if low is None:
            raise UserError(f"{name} needs two bounds on the ratio, as in rollout_rs_threshold=0.5_2.0; got {limit}")
        return math.log(low), math.log(high)
    if low is not None:
        raise UserError(f"{name} takes one upper bound, got {limit}")
    return -torch.inf, high


def parse_bounds(threshold: Threshold, key: str) -> tuple[float | None, float]:
    """(None, high) from a number, (low, high) from "low_high"; 0 < low < high."""
    try:
        ends = [float(part) for part in str(threshold).split("_")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2) or ends[0] <= 0 or (len(ends) == 2 and ends[0] >= ends[1]):
        raise UserError(f"{key}={threshold}: give an upper bound (2.0) or two bounds (0.5_2.0), positive and in order")
    return (None, ends[0]) if len(ends) == 1 else (ends[0], ends[1])
