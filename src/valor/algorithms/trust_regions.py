"""Other trust regions than PPO's clip: on the ratio of the response, on the divergence, on the covariance."""

import torch
from torch import Tensor

from valor.algorithms.ppo import LossInputs, Metrics, clip_bounds, clipped
from valor.algorithms.reductions import masked_mean
from valor.algorithms.registry import register_policy_loss
from valor.algorithms.turns import Turns
from valor.errors import UserError


@register_policy_loss("gspo", aggregation="seq-mean-token-mean")
def gspo(
    inputs: LossInputs,
    *,
    sequence_log_ratio: Tensor | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, Metrics]:
    """PPO's clip on s_i = exp(mean_t log π/π_old), whose gradient reaches each token as through that token alone:
    log s_it = log π_t − sg(log π_t) + sg(log s_i), at most 10 (GSPO, https://arxiv.org/abs/2507.18071).

    sequence_log_ratio [B]: log s_i of sequences that have several rows. Aggregated as seq-mean-token-mean. Its authors
    clip at 3e-4 and 4e-4, far below PPO's 0.2.
    Metrics: pg_clipfrac, ppo_kl.
    """
    if sequence_log_ratio is None:
        sequence_log_ratio = masked_mean(inputs.log_ratio(bound=None).detach(), inputs.response_mask, dim=-1)
    return _clipped_together(inputs, sequence_log_ratio.unsqueeze(-1), clip_ratio_low, clip_ratio_high)


@register_policy_loss("turn_ppo", aggregation="seq-mean-token-mean")
def turn_ppo(
    inputs: LossInputs, *, turn_ids: Tensor | None, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2
) -> tuple[Tensor, Metrics]:
    """`gspo` turn by turn: PPO's clip on s_k = exp(mean of log π/π_old over the policy tokens of turn k), for each of
    these tokens (Turn-PPO of ST-PPO, https://arxiv.org/abs/2511.20718). A response of one turn: GSPO.

    turn_ids [B, T]: number of each policy token's turn. Aggregated as seq-mean-token-mean.
    Metrics: pg_clipfrac, ppo_kl.
    """
    turns = Turns(turn_ids, inputs.response_mask)
    return _clipped_together(inputs, turns.mean(inputs.log_ratio(bound=None).detach()), clip_ratio_low, clip_ratio_high)


def _clipped_together(inputs: LossInputs, log_ratio_of_all: Tensor, low: float, high: float) -> tuple[Tensor, Metrics]:
    """PPO's clip on a ratio that tokens share ([B, T] or [B, 1]), with each token's gradient through its own log π."""
    ratio = (inputs.log_probs - inputs.log_probs.detach() + log_ratio_of_all).clamp(max=10.0).exp()
    loss, binds = clipped(inputs, ratio, low, high)
    metrics = {"pg_clipfrac": inputs.fraction(binds), "ppo_kl": inputs.fraction(-inputs.log_ratio(bound=None))}
    return inputs.aggregate(loss), metrics


@register_policy_loss("geo_mean", aggregation="seq-mean-token-mean", one_row=True)
def geo_mean(
    inputs: LossInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2
) -> tuple[Tensor, Metrics]:
    """L_i = −Ā_i · exp(mean_t y_t): the geometric mean of ratios that are clipped token by token, in log space, on the
    side where the advantage pushes: y = min(x, high) for A > 0, max(x, −low) for A < 0; x = log π/π_old
    (GMPO, https://arxiv.org/abs/2507.20673). Ā_i: mean advantage of the response.

    Aggregated as the mean over responses. Weights of the rollout multiply each response by their mean over its tokens.
    Metrics: pg_clipfrac (A > 0 beyond high), pg_clipfrac_lower (A < 0 beyond −low), ppo_kl.
    """
    clip_bounds(clip_ratio_low, clip_ratio_high)
    log_ratio, advantages, mask = inputs.log_ratio(bound=None), inputs.advantages, inputs.response_mask
    sign = advantages.sign()
    bounded = torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip_ratio_low, clip_ratio_high)) * sign
    ratio = masked_mean(bounded, mask, dim=-1).clamp(max=10.0).exp()
    loss = -masked_mean(advantages, mask, dim=-1) * ratio
    metrics = {
        "pg_clipfrac": inputs.fraction((log_ratio > clip_ratio_high) & (advantages > 0)),
        "pg_clipfrac_lower": inputs.fraction((log_ratio < -clip_ratio_low) & (advantages < 0)),
        "ppo_kl": inputs.fraction(-log_ratio),
    }
    return inputs.aggregate(loss.unsqueeze(-1).expand_as(mask)), metrics


@register_policy_loss("dppo_tv")
def dppo_tv(
    inputs: LossInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float | None = 3.0
) -> tuple[Tensor, Metrics]:
    """L = −A · sg(min(ρ, c)) · log π · keep; a token is kept while π − π_old ≤ high (A > 0) or ≥ −low (A ≤ 0): the
    total variation of the sampled token (https://arxiv.org/abs/2602.04879). Ratios of rare tokens are not
    punished. clip_ratio_c: c; None does not truncate.

    Metrics: pg_clipfrac (tokens not kept), ppo_kl.
    """
    change = inputs.log_probs.detach().exp() - inputs.old_log_probs.exp()
    keep = (change <= clip_ratio_high).where(inputs.advantages > 0, change >= -clip_ratio_low)
    return _truncated(inputs, keep, clip_ratio_c)


@register_policy_loss("dppo_kl", paper="https://arxiv.org/abs/2602.04879")
def dppo_kl(
    inputs: LossInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float | None = 3.0
) -> tuple[Tensor, Metrics]:
    """As `dppo_tv` with the KL of "this token or any other": p₀ log(p₀/p) + (1−p₀) log((1−p₀)/(1−p)), p₀ = π_old.

    Kept while it is ≤ high and A > 0 (≤ low and A ≤ 0), or the token moves against its advantage anyway.
    Metrics: pg_clipfrac (tokens not kept), ppo_kl.
    """
    log_probs, old_log_probs = inputs.log_probs.detach(), inputs.old_log_probs
    new, old = log_probs.exp(), old_log_probs.exp()
    others = (1.0 - old) * ((1.0 - old + 1e-8) / (1.0 - new + 1e-8)).log()
    divergence = old * (old_log_probs - log_probs) + others
    rising = (divergence <= clip_ratio_high) | (new <= old)
    falling = (divergence <= clip_ratio_low) | (new >= old)
    return _truncated(inputs, rising.where(inputs.advantages > 0, falling), clip_ratio_c)


def _truncated(inputs: LossInputs, keep: Tensor, clip_ratio_c: float | None) -> tuple[Tensor, Metrics]:
    if clip_ratio_c is not None and clip_ratio_c <= 1.0:
        raise UserError(f"clip_ratio_c bounds the importance ratio and must be greater than 1, got {clip_ratio_c}")
    log_ratio = inputs.log_ratio()
    ratio = log_ratio.detach().exp()
    weight = (ratio if clip_ratio_c is None else ratio.clamp(max=clip_ratio_c)) * keep
    metrics = {"pg_clipfrac": inputs.fraction(~keep), "ppo_kl": inputs.fraction(-log_ratio)}
    return inputs.aggregate(-inputs.advantages * weight * inputs.log_probs), metrics


@register_policy_loss("clip_cov")
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
    clip_cov_lb < cov < clip_cov_ub that the clip leaves alone (https://arxiv.org/abs/2505.22617). Draws come from
    `generator`.

    Metrics: pg_clipfrac, pg_clipfrac_cov (tokens without gradient), ppo_kl.
    """
    log_ratio, covariance = inputs.log_ratio(), _covariance(inputs)
    loss, binds = clipped(inputs, log_ratio.exp(), clip_ratio_low, clip_ratio_high)
    eligible = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & ~binds
    candidates = (eligible & (inputs.response_mask != 0)).flatten().nonzero().squeeze(1)
    number = max(int(clip_cov_ratio * int((inputs.response_mask != 0).sum())), 1)
    order = torch.randperm(len(candidates), generator=generator, device=generator.device if generator else "cpu")
    without_gradient = torch.zeros(log_ratio.numel(), dtype=torch.bool, device=log_ratio.device)
    without_gradient[candidates[order[:number].to(candidates.device)]] = True
    without_gradient = without_gradient.view_as(log_ratio)
    metrics = {
        "pg_clipfrac": inputs.fraction(binds),
        "pg_clipfrac_cov": inputs.fraction(without_gradient),
        "ppo_kl": inputs.fraction(-log_ratio),
    }
    return inputs.aggregate(loss.masked_fill(without_gradient, 0.0)), metrics


@register_policy_loss("kl_cov")
def kl_cov(inputs: LossInputs, *, kl_cov_ratio: float = 2e-4, ppo_kl_coef: float = 0.1) -> tuple[Tensor, Metrics]:
    """L = −Aρ without a clip; the max(1, ⌊kl_cov_ratio · tokens⌋) tokens of largest covariance add
    ppo_kl_coef · |log π/π_old| (https://arxiv.org/abs/2505.22617). Metrics: ppo_kl, ppo_kl_abs.
    """
    if not 0.0 <= kl_cov_ratio <= 1.0:
        raise UserError("kl_cov_ratio is a fraction of the tokens, between 0 and 1")
    log_ratio = inputs.log_ratio()
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
