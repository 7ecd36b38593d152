"""Policy losses whose importance ratio belongs to the whole response."""

import torch
from torch import Tensor

from valor.algorithms.ppo import LossInputs, Metrics, clip_bounds
from valor.algorithms.reductions import masked_mean


def gspo(inputs: LossInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> tuple[Tensor, Metrics]:
    """PPO's clip on s_i = exp(mean_t log π/π_old), whose gradient reaches each token as through that token alone:
    log s_it = log π_t − sg(log π_t) + sg(log s_i), at most 10 (GSPO, https://arxiv.org/abs/2507.18071).

    Aggregated as seq-mean-token-mean. Its authors clip at 3e-4 and 4e-4, far below PPO's 0.2.
    Metrics: pg_clipfrac, ppo_kl.
    """
    low, high = clip_bounds(clip_ratio_low, clip_ratio_high)
    log_ratio = inputs.log_ratio(bound=None)
    sequence = masked_mean(log_ratio.detach(), inputs.response_mask, dim=-1).unsqueeze(-1)
    ratio = (inputs.log_probs - inputs.log_probs.detach() + sequence).clamp(max=10.0).exp()
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(low, high)
    metrics = {"pg_clipfrac": inputs.fraction(clipped > unclipped), "ppo_kl": inputs.fraction(-log_ratio)}
    return inputs.aggregate(torch.maximum(unclipped, clipped)), metrics


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
