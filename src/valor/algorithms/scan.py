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


class Packing:
    """Moves the policy tokens of rows (mask [R, T], 0/1, float) to the left of a buffer [R, W], in order, and back.

    Where no row has a gap nothing needs to move: W = T. Otherwise W = T + 1 and slot 0 is a bin: masked positions write
    there and, since it is emptied, read 0 from there. Slots after a row's policy tokens are 0.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.gaps = mask.shape[1] > 1 and mask.numel() > 0 and bool((mask[:, 1:] - mask[:, :-1]).amax() > 0)
        if self.gaps:
            present = mask.bool()
            seen = present.cumsum(1)
            self.counts = seen[:, -1].clone()
            self.slots = seen.mul_(present)
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
        buffer = x.new_zeros(x.shape[0], x.shape[1] + 1).scatter_(1, self.slots, x)
        return self.emptied(buffer)

    def pack_rewards(self, rewards: Tensor, on_masked: str) -> Tensor:
        """[R, T] to [R, W]; a reward at a masked position goes to the last policy token before it (else the first):
        "carry", or is lost: "drop"."""
        if choose(on_masked, REWARD_ON_MASKED, "reward_on_masked") == "carry":
            rewards = self._carried(rewards)
        return self.pack(rewards)

    def _carried(self, rewards: Tensor) -> Tensor:
        """Rewards [R, T] with those at masked positions moved to policy tokens."""
        elsewhere = rewards - rewards * self.mask
        if not elsewhere.numel() or bool(elsewhere.abs().amax() == 0):
            return rewards
        present = self.mask.bool()
        elsewhere = rewards.masked_fill(present | ~rewards.isfinite(), 0.0)
        position = torch.arange(rewards.shape[1], device=rewards.device).expand_as(present)
        before = position.masked_fill(~present, -1).cummax(1).values
        first = position.masked_fill(~present, rewards.shape[1] - 1).amin(1, keepdim=True)
        return rewards.scatter_add(1, torch.where(before < 0, first, before), elsewhere)

    def emptied(self, buffer: Tensor) -> Tensor:
        """The buffer [R, W] with nothing in the bin, if there is one; in place."""
        if self.gaps:
            buffer[:, 0] = 0.0
        return buffer

    def unpack(self, buffer: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, W] back to [R, T]; masked positions 0."""
        if not self.gaps:
            return buffer if out is None else out.copy_(buffer)
        return torch.gather(self.emptied(buffer), 1, self.slots, out=out)

    def unpack_carried(self, buffer: Tensor) -> Tensor:
        """[R, W] back to [R, T]; a masked position shows what the next policy token has (0 after the last)."""
        if not self.gaps:
            return buffer
        upcoming = (self.mask.bool().cumsum(1) + (self.mask == 0)).clamp(max=buffer.shape[1] - 1)
        beyond = upcoming > self.counts.unsqueeze(1)
        return buffer.gather(1, upcoming).masked_fill(beyond, 0.0)
