"""Functions of whole next-token distributions: entropy, exact KL, Σπ². Logits [..., V]; results float32 [...]."""

import torch
from torch import Tensor


def entropy_from_logits(logits: Tensor) -> Tensor:
    """H = logsumexp(z) − Σ_v softmax(z)_v z_v, in nats."""
    log_probs = logits.float().log_softmax(-1)
    # A token ruled out by −inf contributes 0, not 0 · −inf.
    return -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(-1)


def full_kl_from_logits(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(π ‖ π_ref) = Σ_v π_v (log π_v − log π_ref,v): the exact divergence that k1, k2 and k3 estimate."""
    log_probs, ref_log_probs = logits.float().log_softmax(-1), ref_logits.float().log_softmax(-1)
    gap = (log_probs - ref_log_probs).masked_fill(log_probs == -torch.inf, 0.0)
    return (log_probs.exp() * gap).sum(-1)


def sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Σ_v π_v² = exp(logsumexp(2z) − 2 logsumexp(z)), which `optimal_token_baseline` needs."""
    logits = logits.float()
    return ((2.0 * logits).logsumexp(-1) - 2.0 * logits.logsumexp(-1)).exp()
