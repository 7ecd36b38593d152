"""The data passed between roles: named per-sample tensors and objects, plus metadata of the whole batch.

Shapes: B samples. Every tensor's first dimension is B; every object list has B entries. Ragged token fields are
right-padded with zeros and `concat` widens them, so any batch size can be split over any number of workers and put
together in any order. A tensor may be stored elsewhere (`valor.data.stored`): it is read when it is taken out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from valor.data.stored import Column, Columns, StoredColumn, from_stored, to_stored

_OF_THE_FIRST_ROW = ("prompts", "prompt_lengths")


class Batch:
    """B samples as columns.

    `tensors[name]` is [B, ...], `objects[name]` a list of B Python objects, `meta` holds small facts about the batch
    as a whole (it is copied to every part of a split). Raises ValueError when the columns disagree about B.
    """

    def __init__(
        self,
        tensors: Mapping[str, Column] | None = None,
        objects: Mapping[str, Sequence[Any]] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.tensors = Columns(tensors.raw if isinstance(tensors, Columns) else tensors or {})
        self.objects: dict[str, list[Any]] = {k: list(v) for k, v in (objects or {}).items()}
        self.meta: dict[str, Any] = dict(meta or {})
        columns = {**self.tensors.raw, **self.objects}
        if len({len(column) for column in columns.values()}) > 1:
            sizes = {name: len(column) for name, column in columns.items()}
            raise ValueError(f"columns of one batch must have one length, got {sizes}")

    def __len__(self) -> int:
        column = next(iter((*self.tensors.raw.values(), *self.objects.values())), ())
        return len(column)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors or name in self.objects

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        if len(self.tensors) + len(self.objects) and len(value) != len(self):
            raise ValueError(f"column '{name}' has {len(value)} rows, the batch has {len(self)}")
        self.tensors[name] = value

    def select(self, names: Iterable[str]) -> Batch:
        """The named columns only (tensors or objects), same rows, same meta."""
        names = list(names)
        missing = [n for n in names if n not in self]
        if missing:
            raise KeyError(f"batch has no column {missing}; it has {[*self.tensors, *self.objects]}")
        raw = self.tensors.raw
        return Batch(
            {n: raw[n] for n in names if n in raw}, {n: self.objects[n] for n in names if n in self.objects}, self.meta
        )

    def take(self, indices: Sequence[int] | Tensor) -> Batch:
        """The rows at `indices`, in that order (repetition allowed)."""
        index = torch.as_tensor(indices, dtype=torch.long)
        rows = index.tolist()
        return Batch(
            {k: v[index.to(v.device) if isinstance(v, Tensor) else index] for k, v in self.tensors.raw.items()},
            {k: [v[i] for i in rows] for k, v in self.objects.items()},
            self.meta,
        )

    def union(self, other: Batch) -> Batch:
        """Both batches' columns; on a name that both have, `other` wins. Rows must match in number."""
        return Batch(
            {**self.tensors.raw, **other.tensors.raw}, {**self.objects, **other.objects}, {**self.meta, **other.meta}
        )

    def repeat(self, n: int) -> Batch:
        """Every row n times in a row: [a, b] -> [a, a, b, b] for n = 2."""
        return self.take([i for i in range(len(self)) for _ in range(n)])

    def split(self, parts: Sequence[Sequence[int]]) -> list[Batch]:
        """One batch per list of row indices; lists may differ in length and may be empty."""
        rows, sizes = self.take([row for part in parts for row in part]), [len(part) for part in parts]
        ends = [*accumulate(sizes)]
        tensors = {k: v.split(sizes) for k, v in rows.tensors.raw.items()}
        return [
            Batch(
                {k: v[i] for k, v in tensors.items()},
                {k: v[end - size : end] for k, v in rows.objects.items()},
                self.meta,
            )
            for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on `device`."""
        return Batch({k: v.to(device) for k, v in self.tensors.items()}, self.objects, self.meta)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Rows of all batches, in order. Narrow [B, T] fields are padded with zeros to the widest; metas merge.

        Columns that some (non-empty) batches lack are an error: a silent drop would lose data.
        """
        full = [b for b in batches if len(b)] or list(batches[:1])
        if not full:
            return Batch()
        names = {frozenset((*b.tensors, *b.objects)) for b in full}
        if len(names) > 1:
            raise ValueError(f"batches to concatenate have different columns: {[sorted(n) for n in names]}")
        raw = [b.tensors.raw for b in full]
        tensors = {k: _concat_padded([columns[k] for columns in raw]) for k in full[0].tensors}
        objects = {k: [x for b in full for x in b.objects[k]] for k in full[0].objects}
        meta: dict[str, Any] = {}
        for b in batches:
            meta.update(b.meta)
        return Batch(tensors, objects, meta)

    def __getstate__(self) -> dict[str, Any]:
        columns = {k: to_stored(v) if isinstance(v, Tensor) else v for k, v in self.tensors.raw.items()}
        return self.__dict__ | {"tensors": columns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        columns = {k: v if isinstance(v, StoredColumn) else from_stored(*v) for k, v in state["tensors"].items()}
        self.__dict__ = state | {"tensors": Columns(columns)}


def pad_rows(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lists of different lengths as one right-padded [B, W] tensor and their lengths [B]."""
    lengths = torch.tensor([len(r) for r in rows], dtype=torch.long)
    out = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return out, lengths


def text_rows(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]] | None = None) -> Batch:
    """Token ids as the columns that engines read; None: responses of no tokens."""
    batch = Batch()
    batch["prompts"], batch["prompt_lengths"] = pad_rows(prompts, torch.long)
    responses = [[]] * len(prompts) if responses is None else responses
    batch["responses"], batch["response_lengths"] = pad_rows(responses, torch.long)
    return batch


def unpadded(batch: Batch, of: Literal["prompt", "response"]) -> list[list[int]]:
    """Token ids of each row's prompt or response, without padding."""
    lengths = batch[f"{of}_lengths"].tolist()
    return [ids[:length] for ids, length in zip(batch[f"{of}s"].tolist(), lengths, strict=True)]


def _concat_padded(parts: list[Column]) -> Column:
    stored = [part for part in parts if isinstance(part, StoredColumn)]
    if len(stored) == len(parts):
        return StoredColumn.concat(stored)
    tensors = [part.tensor() if isinstance(part, StoredColumn) else part for part in parts]
    if tensors[0].dim() < 2:
        return torch.cat(tensors)
    width, later = max(p.shape[1] for p in tensors), [0, 0] * (tensors[0].dim() - 2)
    return torch.cat([functional.pad(p, [*later, 0, width - p.shape[1]]) for p in tensors])


class Episodes:
    """A batch by episodes: neighbouring rows with the same number in `episode` [R]; without that column, each row.

    rows: row numbers of each episode, in order. forked: some episode has several rows.
    """

    def __init__(self, batch: Batch) -> None:
        number = batch["episode"] if "episode" in batch else torch.arange(len(batch))
        _, self._index, counts = number.unique_consecutive(return_inverse=True, return_counts=True)
        sizes, ends = counts.tolist(), counts.cumsum(0).tolist()
        self.rows = [[*range(end - size, end)] for size, end in zip(sizes, ends, strict=True)]
        self.forked = len(self.rows) < len(batch)
        self._batch = batch
        self._position = torch.arange(len(batch)) - (counts.cumsum(0) - counts)[self._index]  # of a row in its episode
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
            counts = torch.tensor([len(self.rows[number]) for number in chosen], dtype=torch.long)
            drawn["episode"] = torch.arange(len(chosen)).repeat_interleave(counts)
        return drawn

    def join(self, column: Tensor) -> Tensor:
        """[R, T] as [E, K T] for at most K rows an episode, concatenated; 0 where there is none."""
        if not self.forked:
            return column
        out = column.new_zeros(len(self.rows), self._most, column.shape[1])
        out[self._index, self._position] = column
        return out.flatten(1)

    def part(self, joined: Tensor) -> Tensor:
        """[R, T] from [E, K T]: `join` undone."""
        return joined.unflatten(1, (self._most, -1))[self._index, self._position] if self.forked else joined

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
