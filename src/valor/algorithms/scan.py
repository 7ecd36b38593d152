"""Linear scans along a response, without a Python loop over tokens, and the packing that lets them skip gaps.

Shapes: [R, T] is R rows of T positions; a packed row holds only its policy tokens, moved to the left, in order.
"""

import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from valor.algorithms.registry import choose
from valor.errors import UserError

Result = TypeVar("Result")

REWARD_ON_MASKED: tuple[str, ...] = ("carry", "drop")

# Elements per block: temporaries of this size stay in the outer cache and their memory is reused from block to block.
_BLOCK_ELEMENTS = 2**18
_HUGE_BYTES = 2**24  # below, the allocator reuses memory that it has
_CHUNK = 16  # the fastest width for `_chunked_scan` on CPUs


def row_blocks(x: Tensor) -> Iterator[slice]:
    """Slices over the rows of x [B, T] of about a quarter million elements each; one slice on an accelerator."""
    rows = max(1, _BLOCK_ELEMENTS // max(1, x.shape[1])) if x.device.type == "cpu" else max(1, x.shape[0])
    return (slice(start, min(start + rows, x.shape[0])) for start in range(0, x.shape[0], rows))


def result_like(x: Tensor) -> Tensor:
    """Uninitialised contiguous memory of x's shape and type; a large result on the CPU asks for huge pages, as handing
    out small ones would take a third of the time of an estimator."""
    size = x.numel() * x.element_size()
    if x.device.type != "cpu" or size < _HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages: small ones do as well
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=x.dtype).view(x.shape)


def over_rows(work: Callable[[slice], Result], x: Tensor) -> list[Result]:
    """[work(rows) for rows in row_blocks(x)], on the CPU several blocks at a time, each on one thread.

    A block's temporaries stay in its core's cache, and since every block is worked by one thread and the results come
    in order, numbers do not depend on how many there are.
    """
    blocks = list(row_blocks(x))
    threads = min(torch.get_num_threads(), len(blocks)) if x.device.type == "cpu" else 1
    with _one_thread(x.device):
        if threads <= 1:
            return [work(rows) for rows in blocks]
        with_grad = torch.is_grad_enabled()  # known to the calling thread alone

        def worked(rows: slice) -> Result:
            with torch.set_grad_enabled(with_grad):
                return work(rows)

        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(worked, blocks))


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """torch's own threads are out of the way of ours: its kernels inside run on the thread that calls them."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def suffix_scan(x: Tensor, decay: float | Tensor) -> Tensor:
    """y_t = x_t + decay · y_{t+1} along the last dim of x [R, W], 0 after the end; decay in [0, 1], one or per row [R].

    No division, so no over- or underflow; exact for decay 0 and 1.
    """
    if isinstance(decay, Tensor):
        return _doubling_scan(x, decay.double().unsqueeze(1))
    if not 0.0 <= decay <= 1.0:
        raise UserError(f"gamma and lam must be between 0 and 1: the decay per token would be {decay:g}")
    # A matrix product in lower precision (TF32, bfloat16) would not be exact.
    full_precision = torch.get_float32_matmul_precision() == "highest" and not torch.is_autocast_enabled("cpu")
    if x.device.type == "cpu" and full_precision and x.numel():
        return _chunked_scan(x, float(decay))
    return _doubling_scan(x, torch.tensor(decay, dtype=torch.float64, device=x.device))


def _chunked_scan(x: Tensor, decay: float) -> Tensor:
    """Scans chunks by a product with the triangular matrix of powers, then the heads of the chunks in the same way."""
    rows, width = x.shape
    if width % _CHUNK:
        x = functional.pad(x, (0, -width % _CHUNK))
    triangle, to_next = _powers(decay, x.dtype)
    y = torch.mm(x.reshape(-1, _CHUNK), triangle).view(rows, -1, _CHUNK)
    if y.shape[1] > 1:
        heads = _chunked_scan(y[:, 1:, 0], decay**_CHUNK)
        y[:, :-1].addcmul_(heads.unsqueeze(-1), to_next)
    return y.view(rows, -1)[:, :width]


@lru_cache(maxsize=64)
def _powers(decay: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """decay^(s-t) for s ≥ t, else 0, at [s, t], and decay^(CHUNK-t): what the next chunk's head is worth at t."""
    base, position = torch.tensor(decay, dtype=torch.float64), torch.arange(_CHUNK)
    gap = position[:, None] - position[None, :]
    triangle = (base ** gap.clamp(min=0)).masked_fill(gap < 0, 0.0)
    return triangle.to(dtype), (base ** (_CHUNK - position)).to(dtype)


def _doubling_scan(x: Tensor, decay: Tensor) -> Tensor:
    """After k rounds y_t sums the first 2^k terms (https://doi.org/10.1145/7902.7903); decay: scalar or [R, 1]."""
    y, reach = x.clone(), 1
    while reach < x.shape[1]:
        summed = y[:, :-reach] + decay.to(x.dtype) * y[:, reach:]
        y, decay, reach = torch.cat([summed, y[:, -reach:]], 1), decay * decay, 2 * reach
    return y


def _has_gaps(mask: Tensor) -> bool:
    """Whether a 1 follows a 0 in any row of mask [R, T]."""
    return mask.shape[1] > 1 and bool((mask[:, 1:] > mask[:, :-1]).any())


class Packing:
    """Moves the policy tokens of rows (mask [R, T], 0/1, float) to the left of a buffer [R, W], in order, and back.

    Where no row has a gap, or nothing decays (in_place), nothing needs to move: W = T. Otherwise W > T, policy
    tokens start at slot 1, and slot 0 is a bin: masked positions write there and, since it is emptied, read 0 from
    there. Slots after a row's policy tokens are 0.
    """

    def __init__(self, mask: Tensor, in_place: bool = False) -> None:
        self.mask = mask
        self.in_place = in_place
        self.width = -(-(mask.shape[1] + 1) // _CHUNK) * _CHUNK  # of a buffer: whole chunks need no copy in a scan
        self.gaps = not in_place and _has_gaps(mask)
        if self.gaps:
            present = mask.bool()
            self.seen = present.cumsum(1)
            self.slots = self.seen * present
            self.counts = self.seen[:, -1]
        else:
            self.counts = mask.sum(1).long()

    @property
    def last(self) -> Tensor:
        """[R, 1] slot of each row's last policy token (slot 0 in a row without any)."""
        return (self.counts if self.gaps else self.counts.sub(1).clamp(min=0)).unsqueeze(1)

    def pack(self, x: Tensor) -> Tensor:
        """[R, T] to [R, W]; what masked positions hold is lost, non-finite filler included."""
        if not self.gaps:
            kept = x * self.mask
            return kept if bool(kept.sum().isfinite()) else x.masked_fill(~self.mask.bool(), 0.0)
        buffer = x.new_zeros(x.shape[0], self.width).scatter_(1, self.slots, x)
        return self.emptied(buffer)

    def pack_rewards(self, rewards: Tensor, on_masked: str) -> Tensor:
        """[R, T] to [R, W]; a reward at a masked position goes to the last policy token before it (else the first):
        "carry", or is lost: "drop"."""
        if choose(on_masked, REWARD_ON_MASKED, "reward_on_masked") == "drop":
            return self.pack(rewards)
        if self.gaps:
            return self._carry(rewards, self.seen)
        if self.in_place and bool(self.mask[:, :1].all()) and bool(rewards.sum().isfinite()):
            return rewards  # what a scan without decay adds on its way to a policy token is that token's anyway
        kept = rewards * self.mask
        if not kept.numel() or all(end.item() == 0 for end in torch.aminmax(rewards - kept)):
            return kept
        seen = self.mask.bool().cumsum(1)
        carried = self._carry(rewards, seen)
        return carried.gather(1, seen) * self.mask if self.in_place else carried[:, 1 : rewards.shape[1] + 1]

    def _carry(self, rewards: Tensor, seen: Tensor) -> Tensor:
        """[R, T + 1] rewards at the slot of this or the last policy token, 1 for those before the first."""
        if not bool(rewards.sum().isfinite()):
            rewards = rewards.masked_fill(~self.mask.bool() & ~rewards.isfinite(), 0.0)
        buffer = rewards.new_zeros(rewards.shape[0], self.width).scatter_add_(1, seen, rewards)
        buffer[:, 1] += buffer[:, 0] * (self.counts > 0)
        buffer[:, 0] = 0.0
        return buffer

    def emptied(self, buffer: Tensor) -> Tensor:
        """The buffer [R, W] with nothing in the bin, if there is one; in place."""
        if self.gaps:
            buffer[:, 0] = 0.0
        return buffer

    def unpack(self, buffer: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, W] back to [R, T]; masked positions 0."""
        if not self.gaps:
            # In place, masked positions hold what is carried over them; otherwise they hold 0 already.
            return torch.mul(buffer, self.mask if self.in_place else 1.0, out=out)
        return torch.gather(self.emptied(buffer), 1, self.slots, out=out)

    def unpack_carried(self, buffer: Tensor) -> Tensor:
        """[R, W] back to [R, T]; a masked position shows what the next policy token has (0 after the last)."""
        if not self.gaps:
            return buffer
        upcoming = (self.seen + (self.mask == 0)).clamp(max=buffer.shape[1] - 1)
        return buffer.gather(1, upcoming).masked_fill(upcoming > self.counts.unsqueeze(1), 0.0)
