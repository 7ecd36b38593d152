"""Groups of ranks that read the same rows: the engine's side of sequence and tensor parallelism."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch import nn

from valor.data.batch import Batch
from valor.errors import UserError

_KEY = "ulysses_sequence_parallel_size"


class RowSharing:
    """The neighbouring ranks of `group` put the rows that each was given together, and compute on all of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.first = group, dist.get_rank(group) == 0

    def gather(self, batch: Batch) -> tuple[Batch, slice]:
        """The group's rows, the same on all its ranks, and which of them are this rank's own (collective)."""
        parts: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(parts, batch, group=self._group)
        rank = dist.get_rank(self._group)
        begin = sum(map(len, parts[:rank]))
        whole = Batch.concat(parts)
        return whole, slice(begin, begin + len(batch))


def sequence_group(module: nn.Module, size: int) -> dist.ProcessGroup:
    """This rank's group of `size` neighbours, each of which `module` then lets compute a part of every row.

    UserError: a number that does not divide the ranks or the heads, or a model that cannot read packed rows.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    model = cast(Any, module)
    if not getattr(model, "packed", False):
        raise UserError(
            f"{_KEY}={size} shares packed rows out: leave model.use_remove_padding at true; a model that cannot "
            f"read them (a warning has said so of {type(model.hf).__name__}) needs {_KEY}=1"
        )
    heads = model.hf.config.get_text_config().num_attention_heads
    for what, count in (("attention heads of the model", heads), ("processes", world)):
        if count % size:
            raise UserError(f"{_KEY}={size} does not divide the {count} {what}: set it to a number that does")
    groups: list[Any] = [dist.new_group(list(range(start, start + size))) for start in range(0, world, size)]
    model.sequence_group = groups[rank // size]
    return model.sequence_group
