"""Functions of whole next-token distributions: entropy, exact KL, Σπ². Logits [..., V]; results float32 [...].

chunk_size: positions handled at once, so that float32 copies of V-wide rows never exist for the whole batch; with a
gradient, a chunk's intermediates are computed again in the backward pass instead of being kept.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def entropy_from_logits(logits: Tensor, chunk_size: int | None = None) -> Tensor:
    """H = logsumexp(z) − Σ_v softmax(z)_v z_v, in nats."""
    return _by_position(_entropy, chunk_size, logits)


def full_kl_from_logits(logits: Tensor, ref_logits: Tensor, chunk_size: int | None = None) -> Tensor:
    """KL(π ‖ π_ref) = Σ_v π_v (log π_v − log π_ref,v): the exact divergence that k1, k2 and k3 estimate."""
    return _by_position(_full_kl, chunk_size, logits, ref_logits)


def sum_pi_squared_from_logits(logits: Tensor, chunk_size: int | None = None) -> Tensor:
    """Σ_v π_v² = exp(logsumexp(2z) − 2 logsumexp(z)), which `optimal_token_baseline` needs."""
    return _by_position(_sum_pi_squared, chunk_size, logits)


def _entropy(logits: Tensor) -> Tensor:
    log_probs = logits.float().log_softmax(-1)
    # A token ruled out by −inf contributes 0, not 0 · −inf.
    return -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(-1)


def _full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    log_probs, ref_log_probs = logits.float().log_softmax(-1), ref_logits.float().log_softmax(-1)
    gap = (log_probs - ref_log_probs).masked_fill(log_probs == -torch.inf, 0.0)
    return (log_probs.exp() * gap).sum(-1)


def _sum_pi_squared(logits: Tensor) -> Tensor:
    logits = logits.float()
    return ((2.0 * logits).logsumexp(-1) - 2.0 * logits.logsumexp(-1)).exp()


def _by_position(function: Callable[..., Tensor], chunk_size: int | None, *logits: Tensor) -> Tensor:
    shape = logits[0].shape[:-1]
    flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in logits]
    if chunk_size is None or flat[0].shape[0] <= chunk_size:
        return function(*flat).view(shape)
    with_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in logits)
    chunks = zip(*(tensor.split(chunk_size) for tensor in flat), strict=True)
    parts = [
        checkpoint(function, *chunk, use_reentrant=False) if with_gradient else function(*chunk) for chunk in chunks
    ]
    return torch.cat(parts).view(shape)
