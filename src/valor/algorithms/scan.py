"""Linear scans along a response without a Python loop over tokens.

Shapes: [R, T] is R rows of T positions; a packed row [R, W] holds only its policy tokens, moved to the left, in order.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from valor.algorithms.reductions import over_rows, zeroed
from valor.algorithms.registry import choose
from valor.errors import UserError

REWARD_ON_MASKED: tuple[str, ...] = ("carry", "drop")

_CHUNK = 16  # the fastest width for `_chunked_scan` on CPUs


def suffix_scan(x: Tensor, decay: float | Tensor) -> Tensor:
    """y_t = x_t + decay_t · y_{t+1} along the last dim of x [R, W], 0 after the end; decay in [0, 1]: one, one per row
    [R], or one per position [R, W].

    No division, so no over- or underflow; exact for decay 0 and 1.
    """
    if isinstance(decay, Tensor):
        return _doubling_scan(x, (decay.unsqueeze(1) if decay.ndim == 1 else decay).double().expand_as(x))
    if not 0.0 <= decay <= 1.0:
        raise UserError(f"gamma and lam must be between 0 and 1: the decay per step would be {decay:g}")
    # A matrix product in lower precision (TF32, bfloat16) would not be exact.
    full_precision = torch.get_float32_matmul_precision() == "highest" and not torch.is_autocast_enabled("cpu")
    if x.device.type == "cpu" and full_precision and x.numel():
        return _chunked_scan(x, float(decay))
    return _doubling_scan(x, torch.full_like(x, decay, dtype=torch.float64))


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
    """After k rounds y_t sums the first 2^k terms (https://doi.org/10.1145/7902.7903); decay: float64 [R, W]."""
    y, reach = x.clone(), 1
    while reach < x.shape[1]:
        y = torch.cat([y[:, :-reach] + decay[:, :-1].to(x.dtype) * y[:, reach:], y[:, -reach:]], 1)
        decay, reach = decay[:, :-reach] * decay[:, reach:], 2 * reach  # products over `reach` positions
    return y


class Packing:
    """Moves the policy tokens of rows (mask [R, T], 0/1) to the left of a buffer [R, W], in order, and back.

    Without a gap in any row nothing moves and W = T. With gaps W > T: policy tokens start at slot 1, and masked
    positions write their 0 to slot 0 and read it from there. Slots after the policy tokens hold 0.
    """

    def __init__(self, mask: Tensor) -> None:
        self.has_gaps = mask.shape[1] > 1 and bool((mask[:, 1:] > mask[:, :-1]).any())
        if self.has_gaps:
            present = mask.bool()
            self.slots = present.cumsum(1) * present
            self.width = -(-(mask.shape[1] + 1) // _CHUNK) * _CHUNK  # whole chunks need no copy in a scan

    def pack(self, x: Tensor) -> Tensor:
        """[R, T], 0 at masked positions, to [R, W]."""
        return x.new_zeros(x.shape[0], self.width).scatter_(1, self.slots, x) if self.has_gaps else x

    def unpack(self, buffer: Tensor, out: Tensor) -> Tensor:
        """[R, W] back to `out` [R, T]; masked positions 0. Empties slot 0, where a scan leaves what it carries."""
        if not self.has_gaps:
            return out.copy_(buffer)
        buffer[:, 0] = 0.0
        return torch.gather(buffer, 1, self.slots, out=out)


def credit_policy_tokens(rewards: Tensor, mask: Tensor, on_masked: str) -> Tensor:
    """[R, T] rewards that are 0 at masked positions (a new tensor).

    on_masked: a reward there goes to the last policy token before it, else to the first one ("carry"), or is lost
    ("drop"). Non-finite filler at masked positions is ignored.
    """
    kept = zeroed(rewards, mask)
    if choose(on_masked, REWARD_ON_MASKED, "reward_on_masked") == "drop" or torch.equal(kept, rewards):
        return kept
    finite = rewards.masked_fill(~mask.bool() & ~rewards.isfinite(), 0.0)
    position = torch.arange(mask.shape[1], device=mask.device)
    latest = torch.where(mask.bool(), position, mask.argmax(1, keepdim=True)).cummax(1).values
    return torch.zeros_like(kept).scatter_add_(1, latest, finite).mul_(mask)


def sums_to_go(rewards: Tensor, mask: Tensor, on_masked: str, out: Tensor) -> Tensor:
    """out [R, T]: Σ of the rewards from here to the end, 0 at masked positions."""
    # Without decay the scan itself brings a reward on a masked position to the policy token before it, if there is one.
    if on_masked != "carry" or not (bool(mask[:, :1].all()) and bool(rewards.sum().isfinite())):
        rewards = credit_policy_tokens(rewards, mask, on_masked)
    return torch.mul(suffix_scan(rewards, 1.0), mask, out=out)


def returns_to_go(rewards: Tensor, response_mask: Tensor, gamma: float, reward_on_masked: str = "carry") -> Tensor:
    """G_t = r_t + γ G_{t'}, t' the next policy token; [B, T]. Masked positions do not discount and are 0."""
    mask = response_mask.to(rewards.dtype)
    returns = torch.empty_like(rewards)

    def of_rows(rows: slice) -> None:
        if gamma == 1.0:
            sums_to_go(rewards[rows], mask[rows], reward_on_masked, out=returns[rows])
        else:
            packing = Packing(mask[rows])
            reward = credit_policy_tokens(rewards[rows], mask[rows], reward_on_masked)
            packing.unpack(suffix_scan(packing.pack(reward), gamma), out=returns[rows])

    over_rows(of_rows, rewards)
    return returns
