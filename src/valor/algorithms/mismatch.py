"""How far the sampling engine and the training model are apart: numbers for logs."""

import torch
from torch import Tensor

from valor.algorithms.ppo import LOG_RATIO_BOUND
from valor.algorithms.reductions import keep_masked, log_ratio, masked_mean, masked_sum, masked_var


@torch.no_grad()
def off_policy_metrics(log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, float]:
    """Perplexities of both policies on the sampled responses, and the divergence between them; inputs [B, T].

    *_ppl: mean over sequences of e^(−mean log-prob); kl: mean of −x; k3_kl: mean of e^x − 1 − x; chi2_token: mean
    ρ² − 1; chi2_seq: mean over sequences of e^(2Σx) − 1; eff_sample_size: share of tokens (mean ρ)² / mean ρ²;
    x = log π_train − log π_rollout, ρ = e^x, |x| and |Σx| ≤ 20.
    """
    rows = response_mask.bool().any(-1)
    if not bool(rows.any()):
        return {}
    train = -masked_mean(log_probs, response_mask, -1)[rows]
    rollout = -masked_mean(rollout_log_probs, response_mask, -1)[rows]
    raw = keep_masked(log_ratio(log_probs, rollout_log_probs), response_mask)
    x = raw.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    sequence = masked_sum(raw, response_mask, -1)[rows].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    gap = train - rollout
    numbers = {
        "training_ppl": train.exp().mean(),
        "training_log_ppl": train.mean(),
        "rollout_ppl": rollout.exp().mean(),
        "rollout_log_ppl": rollout.mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
        "kl": masked_mean(-raw, response_mask),
        "k3_kl": masked_mean(x.exp() - 1.0 - x, response_mask),
        "chi2_token": masked_mean((2.0 * x).exp(), response_mask) - 1.0,
        "chi2_seq": (2.0 * sequence).exp().mean() - 1.0,
        "eff_sample_size": masked_mean(x.exp(), response_mask).square() / masked_mean((2.0 * x).exp(), response_mask),
    }
    return {key: value.item() for key, value in numbers.items()}


def mismatch_sums(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, num_tokens: float) -> dict[str, Tensor]:
    """Mean and largest |Δp| and |Δ log p| between training forward and rollout engine, of the sampled tokens [B, T].

    num_tokens: of the whole mini-batch, so that the means of its parts add up.
    """
    logs = keep_masked(log_ratio(log_probs, rollout_log_probs).abs(), mask)
    probs = keep_masked((log_probs.exp() - rollout_log_probs.exp()).abs(), mask)
    return {
        "training/rollout_probs_diff_mean": probs.sum() / num_tokens,
        "training/rollout_probs_diff_max": probs.max(),
        "training/rollout_log_probs_diff_mean": logs.sum() / num_tokens,
        "training/rollout_log_probs_diff_max": logs.max(),
    }


def importance_metrics(
    raw: Tensor, weights: Tensor, response_mask: Tensor, low: float | None, high: float, norm: float
) -> dict[str, float]:
    """Spread of the importance weights as used, and how many raw ones lay outside of the bounds (low, else 1/high)."""
    present = response_mask.bool()
    if not bool(present.any()):
        return {}
    used, rows = weights[present], present.any(-1)
    per_row = masked_mean(weights, response_mask, -1)[rows]
    mean = used.mean()
    above = masked_mean((raw > high).float(), response_mask)
    below = masked_mean((raw < (1.0 / high if low is None else low)).float(), response_mask)
    numbers = {
        "rollout_is_mean": mean,
        "rollout_is_std": masked_var(weights, response_mask, unbiased=False).sqrt(),
        "rollout_is_max": used.max(),
        "rollout_is_min": used.min(),
        "rollout_is_eff_sample_size": mean.square() / used.square().mean().clamp(min=1e-12),
        "rollout_is_ratio_fraction_high": above,
        "rollout_is_ratio_fraction_low": below,
        "rollout_is_oob_ratio": above if low is None else above + below,
        "rollout_is_seq_mean": per_row.mean(),
        "rollout_is_seq_max": per_row.max(),
        "rollout_is_seq_min": per_row.min(),
        "rollout_is_seq_max_deviation": (per_row - 1.0).abs().max(),
    }
    return {key: value.item() for key, value in numbers.items()} | {"rollout_is_batch_norm_factor": norm}


def rejection_metrics(name: str, statistic: Tensor | None, inside: Tensor, response_mask: Tensor) -> dict[str, float]:
    """Fractions of tokens and of sequences that an option rejects (all of them together: no name)."""
    present = response_mask.bool()
    rows = present.any(-1)
    if not bool(rows.any()):
        return {}
    prefix = f"rollout_rs_{name}_" if name else "rollout_rs_"
    rejected = present & ~inside
    metrics = {
        f"{prefix}masked_fraction": masked_mean(rejected.float(), response_mask).item(),
        f"{prefix}seq_masked_fraction": rejected.any(-1)[rows].float().mean().item(),
    }
    if statistic is not None:
        seen = statistic.expand_as(present)[present]
        metrics |= {f"{prefix}mean": seen.mean().item(), f"{prefix}max": seen.max().item()}
    return metrics


def ratio_metrics(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, num_tokens: float) -> dict[str, Tensor]:
    """Mean, smallest and largest π/π_old of the policy tokens [B, T], none without any; `num_tokens` as above."""
    if not mask.any():
        return {}
    ratio = log_ratio(log_probs.detach(), old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    other = mask == 0
    return {
        "ppo_ratio_mean": ratio.masked_fill(other, 0.0).sum() / num_tokens,
        "ppo_ratio_min": ratio.masked_fill(other, torch.inf).amin(),
        "ppo_ratio_max": ratio.masked_fill(other, -torch.inf).amax(),
    }
