"""Rows of one episode as one sequence, for everything on the driver that counts episodes or follows one in time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from valor.data.batch import Batch

_OF_THE_FIRST_ROW = ("prompts", "prompt_lengths")


class Episodes:
    """Which rows of a batch are one episode: neighbours with the same number in `episode` [R]; without it, each row.

    rows: row numbers of each episode, in order.
    """

    def __init__(self, batch: Batch) -> None:
        number = batch["episode"] if "episode" in batch else torch.arange(len(batch))
        _, self._index, counts = number.unique_consecutive(return_inverse=True, return_counts=True)
        self.rows = [
            [*range(end - count, end)] for count, end in zip(counts.tolist(), counts.cumsum(0).tolist(), strict=True)
        ]
        self.forked = len(self.rows) < len(batch)
        self._batch = batch
        self._place = torch.arange(len(batch)) - (counts.cumsum(0) - counts)[self._index]  # of a row in its episode
        self._most = max(map(len, self.rows), default=0)

    def sums(self, column: Tensor) -> Tensor:
        """[E] sum of a column [R, T] over the episode's rows."""
        rows = column.sum(-1)
        return rows.new_zeros(len(self.rows)).index_add_(0, self._index, rows) if self.forked else rows

    def spread(self, by_episode: Tensor) -> Tensor:
        """[R] from [E]: each row gets its episode's number."""
        return by_episode[self._index]

    def take(self, chosen: Sequence[int]) -> Batch:
        """The rows of the episodes `chosen`, in that order (repetition allowed), each an episode of its own."""
        drawn = self._batch.take([row for number in chosen for row in self.rows[number]])
        if "episode" in drawn:
            counts = torch.tensor([len(self.rows[number]) for number in chosen])
            drawn["episode"] = torch.arange(len(chosen)).repeat_interleave(counts)
        return drawn

    def join(self, column: Tensor) -> Tensor:
        """[R, T] as [E, K T] for at most K rows an episode: one row behind the other, 0 where there is none."""
        if not self.forked:
            return column
        out = column.new_zeros(len(self.rows), self._most, column.shape[1])
        out[self._index, self._place] = column
        return out.flatten(1)

    def part(self, joined: Tensor) -> Tensor:
        """[R, T] from [E, K T]: `join` undone."""
        return joined.unflatten(1, (self._most, -1))[self._index, self._place] if self.forked else joined

    def joined(self) -> Batch:
        """E episodes as rows: columns [R, T] by `join`, `response_lengths` added up, prompts of the first row, all else
        of the last one. The batch itself where no episode has several rows.
        """
        batch = self._batch
        if not self.forked:
            return batch
        last, first = (batch.take([rows[i] for rows in self.rows]) for i in (-1, 0))
        columns = {name: first[name] for name in _OF_THE_FIRST_ROW if name in batch}
        columns["response_lengths"] = torch.stack([batch["response_lengths"][rows].sum() for rows in self.rows])
        shape = batch.tensors.raw["response_mask"].shape
        for name, column in batch.tensors.raw.items():
            if name not in columns and column.shape == shape:
                columns[name] = self.join(batch[name])
        return last.union(Batch(columns))

    def split(self, joined: Batch) -> Batch:
        """The rows with what `joined` has gained: [E, K T] by `part`, [E] at each of the episode's rows."""
        if not self.forked:
            return joined
        gained = {name: joined[name] for name in joined.tensors if name not in self._batch}
        columns = {name: self.part(x) if x.ndim == 2 else self.spread(x) for name, x in gained.items()}
        return self._batch.union(Batch(columns))
