"""Values as distributions of returns: quantiles, means between two levels, their loss, their targets, their quality.

Shapes: K quantiles along the last dim, that number i (from 0) at the level τ_i = (i + ½) / K.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from valor.algorithms.advantages import compute_advantages
from valor.algorithms.registry import register_value_loss
from valor.algorithms.value_losses import PerToken
from valor.errors import UserError


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
    found = torch.searchsorted(weights.cumsum(-1).contiguous(), levels)
    return atoms[found.clamp(max=len(atoms) - 1)]


def quantile_targets(name: str, *, quantiles: Tensor, **inputs: Any) -> Tensor:
    """[B, T, K] returns of the estimator `name` in which each value is the quantile of one level: distributional GAE.

    With gae: target_i,t = θ_i(s_t) + Σ_k (γλ)^k δ_i,t+k, δ_i,t = r_t + γ θ_i(s_t') − θ_i(s_t). A λ-return mixes
    bootstrapped values; here those of the same level are mixed, so that their distribution keeps its spread. The mean
    over i is GAE's own return of the mean value, exactly, since both are linear; the spread is exact at λ = 1 (every
    target is the return) and an approximation below, where the true distribution is the mixture and not the mean of
    quantile functions. Distributional GAE is the idea of DVPO (https://arxiv.org/abs/2512.03847); this formula is ours,
    and its regularisers of the tails are not here. inputs: as in `compute_advantages`.
    """
    levels = quantiles.unbind(-1)
    return torch.stack([compute_advantages(name, **{**inputs, "values": one})[1] for one in levels], -1)


def crps(quantiles: Tensor, outcomes: Tensor) -> Tensor:
    """[N] E|X − y| − ½ E|X − X'| of K equally likely quantiles [N, K] and outcomes y [N]: the continuous ranked
    probability score (Gneiting and Raftery 2007). 0 is best; of one point it is the absolute error."""
    apart = (quantiles.unsqueeze(-1) - quantiles.unsqueeze(-2)).abs().mean((-2, -1))
    return (quantiles - outcomes.unsqueeze(-1)).abs().mean(-1) - 0.5 * apart


def coverage(quantiles: Tensor, outcomes: Tensor, thresholds: Tensor) -> list[dict[str, float]]:
    """Of each threshold c: the mean predicted probability of an outcome of at most c, and how often it was so.

    quantiles [N, K], outcomes [N]. Both are the same for a distribution that is right, continuous or not.
    """
    return [
        {
            "at": float(c),
            "predicted": float((quantiles <= c).double().mean()),
            "observed": float((outcomes <= c).double().mean()),
        }
        for c in thresholds
    ]
