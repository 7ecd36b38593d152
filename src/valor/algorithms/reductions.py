"""Masked reductions: the one place where a loss or statistic meets its mask and its denominator.

Shapes: B sequences, T response positions. A mask is 0/1 (any dtype). Values where the mask is 0 never count, NaN and
infinities included, in the result and in the gradient; a reduction over nothing is 0.
"""

import torch
from torch import Tensor

from valor.algorithms.registry import choose

LOSS_AGG_MODES: tuple[str, ...] = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
WHITENING_SCOPES: tuple[str, ...] = ("batch", "none")

LOWEST_LOG_PROB = -1e6  # what a token that is ruled out has instead of −∞: its square, and differences, are finite

Denominator = float | Tensor | None


def keep_masked(x: Tensor, mask: Tensor) -> Tensor:
    """x where the mask is 1, exactly 0 elsewhere (a product would let NaN * 0 through)."""
    return x.masked_fill(mask == 0, 0.0)


def log_ratio(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """log π − log π' of the same tokens, finite also where one of them, or both, are −∞."""
    return log_probs.clamp(min=LOWEST_LOG_PROB) - other_log_probs.clamp(min=LOWEST_LOG_PROB)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the masked-in entries, over everything or along `dim`."""
    masked = keep_masked(x, mask)
    return masked.sum() if dim is None else masked.sum(dim)


def masked_count(mask: Tensor, dim: int | None = None) -> Tensor:
    """Number of masked-in entries as float32."""
    present = mask.bool()
    return (present.sum() if dim is None else present.sum(dim)).float()


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the masked-in entries; 0 where there are none."""
    return masked_sum(x, mask, dim) / masked_count(mask, dim).clamp(min=1.0)


def masked_moments(x: Tensor, mask: Tensor) -> tuple[float, float, float]:
    """Count, mean and Σ (x − mean)² of the masked-in entries of x [B, T].

    In float64, in which squares of float32 numbers are exact. Each row is summed by one thread, so that the numbers do
    not depend on how many there are.
    """
    wide = keep_masked(x, mask).double()
    count, total = mask.bool().sum().item(), wide.sum(-1).sum().item()
    squares = wide.square().sum(-1).sum().item() - total * total / max(count, 1)
    return count, total / max(count, 1), max(squares, 0.0)


def masked_var(x: Tensor, mask: Tensor, *, unbiased: bool = True) -> Tensor:
    """Variance of the masked-in entries (Bessel's correction by default); 0 for fewer than two of them. No gradient."""
    count, _, squares = masked_moments(x.detach(), mask)
    return torch.tensor(squares / max(count - unbiased, 1), dtype=x.dtype, device=x.device)


@torch.no_grad()
def masked_whiten(x: Tensor, mask: Tensor, *, scope: str = "batch") -> Tensor:
    """(x − mean) / sqrt(var + 1e-8) of x [B, T], with the statistics of its masked-in entries; others become 0.

    scope: "batch" (all of it) or "none" (x where masked in). To whiten by mini-batch, call it on each.
    A single masked-in entry has no spread: it becomes 0 (verl raises). No gradient.
    """
    if choose(scope, WHITENING_SCOPES, "whitening scope") == "none":
        return keep_masked(x, mask)
    count, mean, squares = masked_moments(x, mask)
    scale = (squares / max(count - 1, 1) + 1e-8) ** -0.5
    return keep_masked((x - mean) * scale, mask)


def last_token(response_mask: Tensor) -> Tensor:
    """[B] int64 position of the last policy token; 0 in a row without any."""
    position = torch.arange(response_mask.shape[1], device=response_mask.device)
    return (position * response_mask.bool()).amax(1)


def aggregate_loss(
    loss: Tensor,
    mask: Tensor,
    mode: str = "token-mean",
    scale_factor: float | None = None,
    denominator: Denominator = None,
    sequence_lengths: Tensor | None = None,
) -> Tensor:
    """One number from per-token losses [B, T]; with a global `denominator` the parts of a mini-batch simply add up.

    token-mean               Σ_it l / N            N: tokens
    token-sum                Σ_it l
    seq-mean-token-sum       Σ_i Σ_t l / S         S: sequences with at least one masked-in token
    seq-mean-token-sum-norm  the former / scale_factor (DrGRPO, https://arxiv.org/abs/2503.20783)
    seq-mean-token-mean      Σ_i (Σ_t l / n_i) / S n_i: tokens of sequence i

    denominator: N (token-mean) or S (seq-mean-*) of the whole mini-batch when `loss` is a part of it; default: counted
        in `mask`, fully masked rows left out. token-sum has none.
    sequence_lengths [B]: n_i, where a sequence has several rows and `denominator` counts sequences; default: those of
        `mask`.
    scale_factor: of seq-mean-token-sum-norm alone; default T, the padded width, which ties the loss to the padding:
        pass the longest response allowed.
    An empty mask gives 0, and a gradient of 0.
    """
    choose(mode, LOSS_AGG_MODES, "loss_agg_mode")
    if mode == "token-sum":
        return masked_sum(loss, mask)
    if mode == "token-mean":
        return masked_sum(loss, mask) / _positive(masked_count(mask) if denominator is None else denominator)
    lengths = masked_count(mask, -1)
    rows = masked_sum(loss, mask, -1)
    if mode == "seq-mean-token-mean":
        rows = rows / (lengths if sequence_lengths is None else sequence_lengths).clamp(min=1.0)
    total = rows.sum() / _positive((lengths > 0).sum() if denominator is None else denominator)
    if mode == "seq-mean-token-sum-norm":
        total = total / (float(mask.shape[-1]) if scale_factor is None else scale_factor)
    return total


def loss_denominator(mode: str, num_tokens: Denominator, num_sequences: Denominator) -> Denominator:
    """The global count that `mode` divides by: tokens or sequences."""
    return num_tokens if mode.startswith("token-") else num_sequences


def token_fraction(hit: Tensor, mask: Tensor, num_tokens: Denominator) -> Tensor:
    """Additive metric: Σ hit over the mask / (global) number of tokens."""
    return aggregate_loss(hit.detach().float(), mask, "token-mean", denominator=num_tokens)


def _positive(count: float | Tensor) -> float | Tensor:
    """A denominator that makes 0/0 the 0 it should be; counts are whole numbers, so 1 is the least real one."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(float(count), 1.0)
