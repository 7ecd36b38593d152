"""The exact KL divergence of whole next-token distributions. Logits [..., V]; result float32 [...]."""

import torch
from torch import Tensor


def full_kl_from_logits(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(π ‖ π_ref) = Σ_v π_v (log π_v − log π_ref,v): the exact divergence that k1, k2 and k3 estimate."""
    log_probs, ref_log_probs = logits.float().log_softmax(-1), ref_logits.float().log_softmax(-1)
    # A token ruled out by −inf contributes 0, not 0 · −inf.
    gap = (log_probs - ref_log_probs).masked_fill(log_probs == -torch.inf, 0.0)
    return (log_probs.exp() * gap).sum(-1)
