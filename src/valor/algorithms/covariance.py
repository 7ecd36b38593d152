"""Policy losses that hold back the few tokens whose covariance of advantage and log-probability drives entropy down.

Both from "The entropy mechanism" (https://arxiv.org/abs/2505.22617). The covariance is centred, and tokens are chosen,
over the tokens that one call sees: a mini-batch cut into micro-batches chooses in each of them.
"""

import torch
from torch import Tensor

from valor.algorithms.ppo import LossInputs, Metrics, clip_bounds
from valor.algorithms.reductions import masked_mean
from valor.errors import UserError


def clip_cov(
    inputs: LossInputs,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO's clip, and no gradient for max(1, ⌊clip_cov_ratio · tokens⌋) tokens drawn at random among those with
    clip_cov_lb < cov < clip_cov_ub that the clip leaves alone. Draws come from `generator`.

    Metrics: pg_clipfrac, pg_clipfrac_cov (tokens held back), ppo_kl.
    """
    low, high = clip_bounds(clip_ratio_low, clip_ratio_high)
    log_ratio, advantages = inputs.log_ratio(bound=None), inputs.advantages
    ratio = log_ratio.exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(low, high)
    covariance = _covariance(inputs)
    eligible = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & (clipped <= unclipped)
    candidates = (eligible & (inputs.response_mask != 0)).flatten().nonzero().squeeze(1)
    number = max(int(clip_cov_ratio * int((inputs.response_mask != 0).sum())), 1)
    order = torch.randperm(len(candidates), generator=generator, device=generator.device if generator else "cpu")
    held_back = torch.zeros(log_ratio.numel(), dtype=torch.bool, device=log_ratio.device)
    held_back[candidates[order[:number].to(candidates.device)]] = True
    held_back = held_back.view_as(log_ratio)
    metrics = {
        "pg_clipfrac": inputs.fraction(clipped > unclipped),
        "pg_clipfrac_cov": inputs.fraction(held_back),
        "ppo_kl": inputs.fraction(-log_ratio),
    }
    return inputs.aggregate(torch.maximum(unclipped, clipped).masked_fill(held_back, 0.0)), metrics


def kl_cov(inputs: LossInputs, *, kl_cov_ratio: float = 2e-4, ppo_kl_coef: float = 0.1) -> tuple[Tensor, Metrics]:
    """L = −Aρ without a clip; the max(1, ⌊kl_cov_ratio · tokens⌋) tokens of largest covariance add
    ppo_kl_coef · |log π/π_old|. Metrics: ppo_kl, ppo_kl_abs.
    """
    if not 0.0 <= kl_cov_ratio <= 1.0:
        raise UserError("kl_cov_ratio is a fraction of the tokens, between 0 and 1")
    log_ratio = inputs.log_ratio(bound=None)
    loss = -inputs.advantages * log_ratio.exp()
    present = inputs.response_mask != 0
    tokens = int(present.sum())
    if tokens:
        covariance = _covariance(inputs).masked_fill(~present, -torch.inf).flatten()
        chosen = torch.zeros_like(covariance, dtype=torch.bool)
        chosen[covariance.topk(max(1, int(kl_cov_ratio * tokens))).indices] = True
        loss = loss + torch.where(chosen.view_as(loss), ppo_kl_coef * log_ratio.abs(), 0.0)
    metrics = {"ppo_kl": inputs.fraction(-log_ratio), "ppo_kl_abs": inputs.fraction(log_ratio.abs())}
    return inputs.aggregate(loss), metrics


def _covariance(inputs: LossInputs) -> Tensor:
    """(A − mean A)(log π − mean log π) per token, without gradient."""
    log_probs, advantages, mask = inputs.log_probs.detach(), inputs.advantages, inputs.response_mask
    return (advantages - masked_mean(advantages, mask)) * (log_probs - masked_mean(log_probs, mask))
