"""Ulysses sequence parallelism (Jacobs et al., 2023): ranks of a group hold parts of the same rows.

Outside attention a rank computes its own positions; for attention the group exchanges, so that each rank has all
positions of some of the heads. Every rank of a group computes the whole loss from all ranks' numbers, and its gradient
is that of its own positions: summed over ranks it is the gradient of the loss.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def heads_to_positions(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[1, H / s, N, D], all positions of this rank's heads, to [1, H, N / s, D], all heads of its positions."""
    return _Exchange.apply(x, group, True)


def positions_to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of `heads_to_positions`."""
    return _Exchange.apply(x, group, False)


def put_together(own: Tensor, begin: int, total: int, group: dist.ProcessGroup) -> Tensor:
    """[total, ...] on all ranks from each one's [n, ...], which begins at `begin`; the gradient is the own part's."""
    return _PutTogether.apply(own, begin, total, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_positions: bool) -> Tensor:
        ctx.group, ctx.to_positions = group, to_positions
        return _exchange(x, group, to_positions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _exchange(grads[0], ctx.group, not ctx.to_positions), None, None


def _exchange(x: Tensor, group: dist.ProcessGroup, to_positions: bool) -> Tensor:
    ranks = group.size()
    _one, heads, length, size = x.shape
    if to_positions:  # to each rank its positions, from each rank its heads
        sent = x[0].unflatten(1, (ranks, length // ranks)).transpose(0, 1).contiguous()
    else:
        sent = x[0].unflatten(0, (ranks, heads // ranks)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    if to_positions:
        return received.flatten(0, 1)[None]
    return received.transpose(0, 1).reshape(1, heads // ranks, ranks * length, size)


class _PutTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, begin: int, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.rows = slice(begin, begin + len(own))
        whole = own.new_zeros(total, *own.shape[1:])
        whole[ctx.rows] = own
        if total:
            dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0][ctx.rows], None, None, None
