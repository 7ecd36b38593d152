"""Masked reductions: the one place where a loss or statistic meets its mask and its denominator.

Shapes: B sequences, T response positions. A mask is 0/1 (any dtype). Values where the mask is 0 never count, NaN and
infinities included, in the result and in the gradient; a reduction over nothing is 0.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

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

# Elements per block of rows: temporaries of this size stay in the outer cache, and their memory is used again.
_BLOCK_ELEMENTS = 2**18
_WIDE_ELEMENTS = 2**16  # of a float64 copy that stays in the inner cache

Denominator = float | Tensor | None
Result = TypeVar("Result")


def keep_masked(x: Tensor, mask: Tensor) -> Tensor:
    """x where the mask is 1, exactly 0 elsewhere (a product would let NaN * 0 through)."""
    return x.masked_fill(mask == 0, 0.0)


def zeroed(x: Tensor, mask: Tensor, out: Tensor | None = None) -> Tensor:
    """`keep_masked` without gradient, by a product: half the time. mask 0/1; out: may be x itself."""
    product = torch.mul(x, mask, out=out)
    return product if bool(product.sum().isfinite()) else product.masked_fill_(mask == 0, 0.0)


def log_ratio(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """log π − log π' of the same tokens, finite also where one of them, or both, are −∞."""
    return log_probs.clamp(min=LOWEST_LOG_PROB) - other_log_probs.clamp(min=LOWEST_LOG_PROB)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the masked-in entries, over everything or along `dim`."""
    kept = keep_masked(x, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_count(mask: Tensor, dim: int | None = None) -> Tensor:
    """Number of masked-in entries as float32."""
    present = mask.bool()
    return (present.sum() if dim is None else present.sum(dim)).float()


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the masked-in entries; 0 where there are none."""
    return masked_sum(x, mask, dim) / masked_count(mask, dim).clamp(min=1.0)


def masked_var(x: Tensor, mask: Tensor, *, unbiased: bool = True) -> Tensor:
    """Variance of the masked-in entries (Bessel's correction by default); 0 for fewer than two of them. No gradient."""
    moments = masked_moments(x, mask)
    return torch.tensor(moments.squares / max(moments.count - float(unbiased), 1.0), dtype=x.dtype, device=x.device)


def last_token(response_mask: Tensor) -> Tensor:
    """[B] int64 position of the last policy token; 0 in a row without any."""
    position = torch.arange(response_mask.shape[1], device=response_mask.device, dtype=torch.int32)
    last = torch.empty(len(response_mask), dtype=torch.long, device=response_mask.device)
    over_rows(lambda rows: last[rows].copy_((position * response_mask[rows].bool()).amax(1)), response_mask)
    return last


def over_rows(work: Callable[[slice], Result], x: Tensor) -> list[Result]:
    """[work(rows)] over blocks of the rows of x [B, T], without gradient; on the CPU several blocks at a time.

    A block's temporaries stay in its core's cache (2 to 3 times as fast at [1024, 8192]). Each block is worked by one
    thread and the results come in order, so numbers do not depend on how many threads there are. An accelerator gets
    all rows at once.
    """
    if x.device.type != "cpu":
        return [work(slice(0, x.shape[0]))]
    height = max(1, _BLOCK_ELEMENTS // max(1, x.shape[1]))
    blocks = [slice(start, min(start + height, x.shape[0])) for start in range(0, x.shape[0], height)]

    def work_alone(rows: slice) -> Result:
        with torch.no_grad():  # which a thread does not inherit
            return work(rows)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's own threads would split the work of ours, and with it the order of sums
    try:
        if min(threads, len(blocks)) <= 1:
            return [work_alone(rows) for rows in blocks]
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work_alone, blocks))
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Moments:
    """Count, mean and Σ (x − mean)² of masked-in entries."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(x: Tensor, mask: Tensor) -> "Moments":
        """Those of x, 0 where the mask is 0; summed in float64, in which the squares of float32 numbers are exact."""
        flat, total, squares = x.reshape(-1), 0.0, 0.0
        for piece in flat.split(_WIDE_ELEMENTS if flat.device.type == "cpu" else max(1, flat.numel())):
            wide = piece.double()
            total, squares = total + wide.sum().item(), squares + wide.dot(wide).item()
        count = mask.sum(-1).double().sum().item()
        squares -= total * total / max(count, 1.0)
        return Moments(count, total / max(count, 1.0), max(squares, 0.0))

    def merge(self, other: "Moments") -> "Moments":
        """Those of both parts together (Chan et al. 1983, https://doi.org/10.2307/2683386)."""
        count, gap = self.count + other.count, other.mean - self.mean
        if count == 0:
            return Moments()
        share = other.count / count
        squares = self.squares + other.squares + gap * gap * self.count * share
        return Moments(count, self.mean + gap * share, squares)


def masked_moments(x: Tensor, mask: Tensor) -> Moments:
    """Moments of the masked-in entries of x [B, T]."""
    parts = over_rows(lambda rows: Moments.of(zeroed(x[rows], mask[rows]), mask[rows]), x)
    return reduce(Moments.merge, parts, Moments())


@torch.no_grad()
def masked_whiten(
    x: Tensor,
    mask: Tensor,
    *,
    scope: str = "batch",
    moments: Moments | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """(x − mean) / sqrt(var + 1e-8) of x [B, T], with the statistics of its masked-in entries; others become 0.

    scope: "batch" (all of it) or "none" (x where masked in). To whiten by mini-batch, call it on each.
    moments: those of x under mask, where they are known. out: tensor to write to, x itself allowed.
    A single masked-in entry has no spread: it becomes 0 (verl raises). No gradient.
    """
    out = torch.empty_like(x) if out is None else out
    if choose(scope, WHITENING_SCOPES, "whitening scope") == "none":
        return out.copy_(keep_masked(x, mask))
    moments = masked_moments(x, mask) if moments is None else moments
    scale = (moments.squares / max(moments.count - 1.0, 1.0) + 1e-8) ** -0.5

    def whiten_rows(rows: slice) -> None:
        whitened = torch.sub(x[rows], moments.mean, out=out[rows]).mul_(scale)
        zeroed(whitened, mask[rows], out=whitened)

    over_rows(whiten_rows, x)
    return out


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
