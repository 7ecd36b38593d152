"""The turns of an episode: where each begins, sums over it, and its numbers back at its tokens.

Shapes: [R, T] is R rows of T positions. `by turn` is [R, T] too: column k belongs to the k-th turn that has a policy
token, columns after the last turn are 0. So nothing depends on how many turns there are, and no device has to be asked.
"""

import torch
from torch import Tensor
from torch.nn import functional

from valor.algorithms.reductions import keep_masked
from valor.errors import UserError


class Turns:
    """turn_ids [R, T]: number of each policy token's turn, from 1, rising along the row; mask [R, T], 0/1.

    starts [R, T]: whether the token is the first policy token of its turn. present, by turn: 1 where there is a turn.
    A turn whose tokens are all masked out is none.
    """

    def __init__(self, turn_ids: Tensor | None, mask: Tensor) -> None:
        if turn_ids is None:
            raise UserError("turns are to be told apart: pass turn_ids [B, T], the number of each policy token's turn")
        numbers = turn_ids.masked_fill(mask == 0, 0)
        before = functional.pad(numbers, (1, 0))[:, :-1].cummax(1).values if numbers.numel() else numbers
        self.mask, self.starts = mask, numbers > before
        self.in_order = (mask == 0) | ((numbers > 0) & (numbers >= before))
        self._column = (self.starts.cumsum(1) - 1).clamp(min=0)
        position = torch.arange(mask.shape[1], device=mask.device)
        self.present = (position < self.starts.sum(1, keepdim=True)).to(mask.dtype)

    def total(self, x: Tensor) -> Tensor:
        """By turn: Σ of x [R, T] over the turn's policy tokens."""
        return torch.zeros_like(x).scatter_add(1, self._column, keep_masked(x, self.mask))

    def first(self, x: Tensor) -> Tensor:
        """By turn: x [R, T] at the turn's first policy token."""
        return torch.zeros_like(x).scatter_add(1, self._column, keep_masked(x, self.starts))

    def mean(self, x: Tensor) -> Tensor:
        """[R, T] mean of x over the policy tokens of the token's turn; 0 where the mask is."""
        return self.spread(self.total(x) / self.total(torch.ones_like(x)).clamp(min=1.0))

    def spread(self, by_turn: Tensor) -> Tensor:
        """[R, T] from by turn: each policy token gets its turn's number, others 0."""
        return keep_masked(by_turn.gather(1, self._column), self.mask)
