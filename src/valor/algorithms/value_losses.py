"""Losses of the critic: regression, classification of 0/1 returns, values as distributions of returns over bins and how
they are read; and the loss of reward models."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from valor.algorithms.ppo import Metrics
from valor.algorithms.reductions import Denominator, aggregate_loss, keep_masked, loss_denominator, token_fraction
from valor.algorithms.registry import VALUE_LOSSES, register_value_loss
from valor.errors import UserError

PerToken = tuple[Tensor, Tensor, Tensor]  # loss, 1 where clipping binds, predicted value; each [B, T]


@register_value_loss("mse")
def clipped_mse(
    values: Tensor, returns: Tensor, *, old_values: Tensor | None = None, cliprange_value: float | None = 0.5
) -> PerToken:
    """½ max((V − R)², (clip(V, V_old ± c) − R)²) (PPO's value clipping, https://arxiv.org/abs/1707.06347);
    c = cliprange_value; None: ½ (V − R)².
    """
    return _clipped(values, returns, old_values, cliprange_value, lambda error: 0.5 * error.square())


@register_value_loss("huber")
def huber(
    values: Tensor,
    returns: Tensor,
    *,
    old_values: Tensor | None = None,
    cliprange_value: float | None = None,
    huber_delta: float = 1.0,
) -> PerToken:
    """½ e² for |e| ≤ δ, δ(|e| − δ/2) beyond: outlying returns pull with bounded force; clipped like mse if asked
    (Huber 1964, https://doi.org/10.1214/aoms/1177703732).
    """
    if huber_delta <= 0:
        raise UserError("huber_delta must be positive")
    zero = torch.zeros_like(returns)
    loss = partial(functional.huber_loss, target=zero, reduction="none", delta=huber_delta)
    return _clipped(values, returns, old_values, cliprange_value, loss)


@register_value_loss("bce")
def bce(values: Tensor, returns: Tensor) -> PerToken:
    """−R log σ(z) − (1 − R) log(1 − σ(z)): z the head's output, σ(z) the value, for returns in [0, 1].

    Returns outside (λ-returns of an untrained critic overshoot a little) count as the nearest end.
    """
    target = returns.clamp(0.0, 1.0)
    loss = functional.binary_cross_entropy_with_logits(values, target, reduction="none")
    return loss, torch.zeros_like(loss), values.detach().sigmoid()


@register_value_loss("hl_gauss")
def hl_gauss(
    values: Tensor,
    returns: Tensor,
    *,
    num_bins: int | None = None,
    value_min: float = 0.0,
    value_max: float = 1.0,
    sigma_bins: float = 0.75,
) -> PerToken:
    """Cross-entropy to a Gaussian around R spread over K bins of [value_min, value_max] (https://arxiv.org/abs/2403.03950).

    values: logits [B, T, K]; num_bins: K, if it is to be checked; sigma_bins: standard deviation in bins. Returns
    outside the range count as its ends.
    """
    if num_bins is not None and num_bins != values.shape[-1]:
        raise UserError(f"hl_gauss of {num_bins} bins got logits of {values.shape[-1]}")
    target = hl_gauss_target(returns, values.shape[-1], value_min, value_max, sigma_bins)
    loss = -(target * values.log_softmax(-1)).sum(-1)
    predicted = hl_gauss_value(values.detach(), value_min=value_min, value_max=value_max)
    return loss, torch.zeros_like(loss), predicted


def hl_gauss_target(
    returns: Tensor, num_bins: int, value_min: float, value_max: float, sigma_bins: float = 0.75
) -> Tensor:
    """[..., K] probability of each bin under a Gaussian around the return, cut at the range and renormalised."""
    if num_bins < 2 or value_max <= value_min or sigma_bins <= 0:
        raise UserError("hl_gauss needs at least 2 bins, value_min < value_max and sigma_bins > 0")
    width = (value_max - value_min) / num_bins
    edges = torch.linspace(value_min, value_max, num_bins + 1, device=returns.device, dtype=returns.dtype)
    centred = edges - returns.clamp(value_min, value_max).unsqueeze(-1)
    cumulative = torch.erf(centred / (sigma_bins * width * 2**0.5))
    mass = cumulative[..., 1:] - cumulative[..., :-1]
    return mass / mass.sum(-1, keepdim=True)


def hl_gauss_value(logits: Tensor, *, value_min: float = 0.0, value_max: float = 1.0) -> Tensor:
    """[...] expected bin centre of logits [..., K]."""
    num_bins = logits.shape[-1]
    half = (value_max - value_min) / (2 * num_bins)
    centres = torch.linspace(value_min + half, value_max - half, num_bins, device=logits.device, dtype=logits.dtype)
    return logits.softmax(-1) @ centres


def _clipped(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor | None,
    cliprange: float | None,
    loss_of: Callable[[Tensor], Tensor],
) -> PerToken:
    loss = loss_of(values - returns)
    if cliprange is None:
        return loss, torch.zeros_like(loss), values.detach()
    if old_values is None:
        raise UserError("value clipping needs old_values; pass cliprange_value=None to train without clipping")
    clipped = values.maximum(old_values - cliprange).minimum(old_values + cliprange)
    clipped_loss = loss_of(clipped - returns)
    return torch.maximum(loss, clipped_loss), (clipped_loss > loss).float(), values.detach()


def value_loss(
    name: str = "mse",
    *,
    values: Tensor,
    old_values: Tensor | None = None,
    returns: Tensor,
    response_mask: Tensor,
    cliprange_value: float | None = 0.5,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    num_tokens: Denominator = None,
    num_sequences: Denominator = None,
    sequence_lengths: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Metrics]:
    """The critic's loss and metrics; values [B, T] with gradient ([B, T, K] for hl_gauss), others [B, T].

    num_tokens, num_sequences, sequence_lengths: as in `policy_loss`.
    Metrics: vf_clipfrac, vpred_mean, vf_error_mean (mean of V − R).
    """
    entry = VALUE_LOSSES[name]

    def at_tokens(x: Tensor) -> Tensor:
        return keep_masked(x, response_mask if x.ndim == response_mask.ndim else response_mask.unsqueeze(-1))

    common = {
        "values": at_tokens(values),
        "returns": at_tokens(returns),
        "old_values": None if old_values is None else keep_masked(old_values, response_mask),
        "cliprange_value": cliprange_value,
    }
    per_token, clipped, predicted = entry.call(common, options)
    denominator = loss_denominator(loss_agg_mode, num_tokens, num_sequences)
    settings = (loss_agg_mode, loss_scale_factor, denominator, sequence_lengths)
    loss = aggregate_loss(per_token, response_mask, *settings)
    metrics = {
        "vf_clipfrac": token_fraction(clipped, response_mask, num_tokens),
        "vpred_mean": token_fraction(predicted, response_mask, num_tokens),
        "vf_error_mean": token_fraction(predicted - common["returns"], response_mask, num_tokens),
    }
    return loss, metrics


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, center_coef: float = 0.0
) -> Tensor:
    """Per pair [B]: -log sigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected)^2.

    The likelihood that the better response wins (Bradley and Terry 1952); the margin is Llama 2's, arXiv:2307.09288
    eq. 2. Scores matter only up to a constant for each prompt; the second term keeps them around 0 (arXiv:2312.09244
    section 2).
    """
    loss = -functional.logsigmoid(chosen - rejected - margin)
    return loss + center_coef * (chosen + rejected).square() if center_coef else loss
