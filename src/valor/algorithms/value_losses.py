"""Losses of the critic: regression, classification of 0/1 returns, values as distributions of returns (over bins, or by
quantiles) and how they are read; and the loss of reward models.

Shapes: K quantiles along the last dim, that number i (from 0) at the level τ_i = (i + ½) / K.
"""

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


def bin_centres(logits: Tensor, value_min: float = 0.0, value_max: float = 1.0) -> Tensor:
    """[K] centres of the bins of logits [..., K]."""
    num_bins = logits.shape[-1]
    half = (value_max - value_min) / (2 * num_bins)
    return torch.linspace(value_min + half, value_max - half, num_bins, device=logits.device, dtype=logits.dtype)


def hl_gauss_value(logits: Tensor, *, value_min: float = 0.0, value_max: float = 1.0) -> Tensor:
    """[...] expected bin centre of logits [..., K]."""
    return logits.softmax(-1) @ bin_centres(logits, value_min, value_max)


def quantile_levels(number: int) -> Tensor:
    """[K] the levels τ_i."""
    return (torch.arange(number, dtype=torch.float64) + 0.5) / number


@register_value_loss("quantile")
def quantile_huber(
    values: Tensor, returns: Tensor, *, num_quantiles: int | None = None, huber_kappa: float = 0.05
) -> PerToken:
    """Mean over i and j of |τ_i − 1{u < 0}| · L_κ(u) / κ, u = R_j − θ_i, L_κ Huber's loss of threshold κ; κ = 0: of
    |τ_i − 1{u < 0}| · |u| (QR-DQN, https://arxiv.org/abs/1710.10044, which sums over i).

    values: θ [B, T, K]; num_quantiles: K, if it is to be checked; returns: R [B, T], or J targets [B, T, J]. Where the
    returns lie within κ of each other the minimum is an expectile: κ is to be small beside their scale.
    """
    if num_quantiles is not None and num_quantiles != values.shape[-1]:
        raise UserError(f"quantile of {num_quantiles} quantiles got {values.shape[-1]}")
    if huber_kappa < 0:
        raise UserError("huber_kappa must be 0 or more")
    targets = returns if returns.ndim == values.ndim else returns.unsqueeze(-1)
    error = targets.unsqueeze(-2) - values.unsqueeze(-1)
    size = error.abs()
    if huber_kappa > 0:
        zero = torch.zeros_like(error)
        size = functional.huber_loss(error, zero, reduction="none", delta=huber_kappa) / huber_kappa
    levels = quantile_levels(values.shape[-1]).to(values).unsqueeze(-1)
    loss = ((levels - (error.detach() < 0).to(values.dtype)).abs() * size).mean((-2, -1))
    return loss, torch.zeros_like(loss), values.detach().mean(-1)


def tail_mean(atoms: Tensor, weights: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """[...] (1 / (high − low)) ∫ F⁻¹(τ) dτ from `low` to `high`, F a distribution of `weights` on `atoms` [..., K].

    (0, 1) is the mean, (0, α) the CVaR of the lower tail (Rockafellar and Uryasev 2000), (β, 1 − β) a mean that leaves
    the tails out.
    """
    x, order = atoms.expand_as(weights).sort(-1)
    w = weights.gather(-1, order)
    top = w.cumsum(-1)
    inside = top.clamp(low, high) - (top - w).clamp(low, high)
    return (x * inside).sum(-1) / (high - low)


def quantiles_of(atoms: Tensor, weights: Tensor) -> Tensor:
    """[..., K] F⁻¹(τ_i) of a distribution on rising `atoms` [K]: the first one at which F reaches τ_i."""
    levels = quantile_levels(len(atoms)).to(weights).expand_as(weights).contiguous()
    index = torch.searchsorted(weights.cumsum(-1).contiguous(), levels)
    return atoms[index.clamp(max=len(atoms) - 1)]


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
    """The critic's loss and metrics; values [B, T] with gradient ([B, T, K] for hl_gauss and quantile), others [B, T];
    returns [B, T, J] for quantile alone.

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
    target = common["returns"] if returns.ndim == response_mask.ndim else common["returns"].mean(-1)
    metrics = {
        "vf_clipfrac": token_fraction(clipped, response_mask, num_tokens),
        "vpred_mean": token_fraction(predicted, response_mask, num_tokens),
        "vf_error_mean": token_fraction(predicted - target, response_mask, num_tokens),
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
