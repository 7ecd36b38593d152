"""Linear scans along a response, without a Python loop over tokens, and the packing that lets them skip gaps.

Shapes: [R, T] is R rows of T positions; a packed row holds only its policy tokens, moved to the left, in order.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from valor.algorithms.registry import choose

REWARD_ON_MASKED: tuple[str, ...] = ("carry", "drop")

# Elements per block: temporaries of this size stay in the outer cache and their memory is reused from block to block.
_BLOCK_ELEMENTS = 2**20
_NEGLIGIBLE = 1e-15  # a factor that no float32 sum notices


def row_blocks(x: Tensor) -> Iterator[slice]:
    """Slices over the rows of x [B, T] of about a million elements each; one slice on an accelerator."""
    rows = max(1, _BLOCK_ELEMENTS // max(1, x.shape[1])) if x.device.type == "cpu" else max(1, x.shape[0])
    return (slice(start, min(start + rows, x.shape[0])) for start in range(0, x.shape[0], rows))


def suffix_scan(x: Tensor, decay: float | Tensor) -> Tensor:
    """y_t = x_t + decay · y_{t+1} along the last dim of x [R, W], 0 after the end; decay in [0, 1], one or per row [R].

    A row's result does not depend, to the bit, on the other rows, on trailing zeros or on the number of threads.
    """
    if isinstance(decay, Tensor):
        return _doubling_scan(x, decay.double().unsqueeze(1))
    rows, width = x.shape
    if width == 0 or decay == 0.0:
        return x.clone()
    # y_t = decay^-t Σ_{s≥t} decay^s x_s, in chunks short enough for the powers, and so long that a chunk feels the one
    # after it but not the one beyond.
    chunk = width if decay >= 1.0 else min(width, math.ceil(math.log(_NEGLIGIBLE) / math.log(decay)))
    backwards = functional.pad(x, (-width % chunk, 0)) if width % chunk else x
    backwards = backwards.flip(1).view(rows, -1, chunk)
    if decay < 1.0:
        steps = torch.arange(chunk, device=x.device, dtype=torch.float64)
        backwards.mul_((decay**-steps).to(x.dtype))
        powers = (decay**steps).to(x.dtype)
        y = backwards.cumsum_(2).mul_(powers)
        y[:, 1:].addcmul_(y[:, :-1, -1:].clone(), powers * decay)
    else:
        y = backwards.cumsum_(2)
    return y.view(rows, -1).flip(1)[:, -width:]


def _doubling_scan(x: Tensor, decay: Tensor) -> Tensor:
    """The scan with a decay per row [R, 1]: after k rounds y_t sums 2^k terms (https://doi.org/10.1145/7902.7903)."""
    y, reach = x.clone(), 1
    while reach < x.shape[1]:
        summed = y[:, :-reach] + decay.to(x.dtype) * y[:, reach:]
        y, decay, reach = torch.cat([summed, y[:, -reach:]], 1), decay * decay, 2 * reach
    return y


def packed(mask: Tensor) -> "Packing":
    """How to move the policy tokens of mask [R, T] to the left: not at all where rows have no gaps."""
    present = mask.bool()
    gaps = bool((present[:, 1:] > present[:, :-1]).any())
    return Packing(present) if gaps else Aligned(present, mask)


class Packing:
    """Moves the policy tokens of rows with gaps (present [R, T], bool) to the left of a buffer [R, W], and back.

    W = T + 1: the last slot is a bin, where masked positions write to and, since it is emptied, read 0 from. All slots
    after a row's policy tokens are 0. counts [R]: policy tokens per row.
    """

    def __init__(self, present: Tensor) -> None:
        self.present = present
        self.width = present.shape[1] + 1
        seen = present.cumsum(1)
        self.counts = seen[:, -1].clone()
        self.latest = seen.sub_(1).clamp_(min=0)  # slot of this or the last policy token before (else the first)
        self.own = self.latest.masked_fill(~present, self.width - 1)

    def pack(self, x: Tensor) -> Tensor:
        """[R, T] to [R, W]."""
        buffer = x.new_zeros(x.shape[0], self.width).scatter_(1, self.own, x)
        buffer[:, -1] = 0.0
        return buffer

    def pack_rewards(self, rewards: Tensor, on_masked: str) -> Tensor:
        """Packs rewards; one at a masked position goes to the last policy token before it (else the first): "carry",
        or is lost: "drop". Non-finite filler at masked positions is ignored."""
        if choose(on_masked, REWARD_ON_MASKED, "reward_on_masked") == "drop":
            return self.pack(rewards)
        if not bool(rewards.sum().isfinite()):
            rewards = rewards.masked_fill(~self.present & ~rewards.isfinite(), 0.0)
        buffer = rewards.new_zeros(rewards.shape[0], self.width).scatter_add_(1, self.latest, rewards)
        if bool((self.counts == 0).any()):
            buffer[self.counts == 0] = 0.0
        return buffer

    def unpack(self, buffer: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, W] back to [R, T]; masked positions 0."""
        return torch.gather(buffer, 1, self.own, out=out)

    def unpack_carried(self, buffer: Tensor) -> Tensor:
        """[R, W] back to [R, T]; a masked position shows what the next policy token has (0 after the last)."""
        return buffer.gather(1, self.present.cumsum(1) - self.present.long())


class Aligned(Packing):
    """Packing where each row's policy tokens are its first ones already: nothing moves, W = T."""

    def __init__(self, present: Tensor, mask: Tensor) -> None:
        self.present = present
        self.mask = mask
        self.width = present.shape[1]
        self.counts = present.sum(1)

    def pack(self, x: Tensor) -> Tensor:
        kept = x * self.mask
        return kept if bool(kept.sum().isfinite()) else x.masked_fill(~self.present, 0.0)

    def pack_rewards(self, rewards: Tensor, on_masked: str) -> Tensor:
        kept = rewards * self.mask
        if torch.equal(kept, rewards):
            return kept
        return Packing(self.present).pack_rewards(rewards, on_masked)[:, : self.width]

    def unpack(self, buffer: Tensor, out: Tensor | None = None) -> Tensor:
        return buffer if out is None else out.copy_(buffer)

    def unpack_carried(self, buffer: Tensor) -> Tensor:
        return buffer
