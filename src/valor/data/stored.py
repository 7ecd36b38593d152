"""Columns stored in another process or an object store: references travel, rows are read where they are needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Stored = tuple[np.ndarray, str | None]
"""A tensor as it is stored: NumPy has no bfloat16, which is stored as int16 under its name."""


class Part(ABC):
    """A reference to a stored tensor [R, W], which can be pickled."""

    shape: tuple[int, int]
    dtype: torch.dtype

    @staticmethod
    @abstractmethod
    def read(parts: Sequence[Any]) -> list[Stored]:
        """The tensors of parts of one class."""


class StoredColumn:
    """[B, W] whose row i is row `row[i]` of part number `part[i]`, padded with zeros to W columns.

    Rows are chosen, repeated and joined without reading them. Rows that were read are cached, also for choices of
    them; other processes get the references alone.
    """

    def __init__(
        self, parts: Sequence[Part], part: np.ndarray, row: np.ndarray, width: int, dtype: torch.dtype
    ) -> None:
        self._parts, self._part, self._row, self._width, self._dtype = parts, part, row, width, dtype
        self._cache: Tensor | None = None  # the rows, once they were read

    @staticmethod
    def of(part: Part) -> StoredColumn:
        """All rows of one part."""
        rows, width = part.shape
        return StoredColumn([part], np.zeros(rows, dtype=np.int64), np.arange(rows), width, part.dtype)

    def __len__(self) -> int:
        return len(self._row)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), self._width))

    def __getitem__(self, index: Tensor) -> StoredColumn:
        part, row = self._part[index.numpy()], self._row[index.numpy()]
        chosen = StoredColumn(self._parts, part, row, self._width, self._dtype)
        chosen._cache = None if self._cache is None else self._cache[index]
        return chosen

    def split(self, sizes: Sequence[int]) -> list[StoredColumn]:
        """Consecutive rows, so many each."""
        index = torch.arange(len(self))
        return [self[rows] for rows in index.split(list(sizes))]

    @staticmethod
    def concat(columns: Sequence[StoredColumn]) -> StoredColumn:
        """Rows of all columns, in order, as wide as the widest."""
        starts = np.cumsum([0, *(len(column._parts) for column in columns)])
        return StoredColumn(
            [part for column in columns for part in column._parts],
            np.concatenate([column._part + start for column, start in zip(columns, starts, strict=False)]),
            np.concatenate([column._row for column in columns]),
            max(column._width for column in columns),
            columns[0]._dtype,
        )

    def tensor(self) -> Tensor:
        """The rows [B, W], read once."""
        if self._cache is None:
            self._cache = torch.zeros(self.shape, dtype=self._dtype)
            array, _ = to_stored(self._cache)  # the same memory
            numbers = np.unique(self._part)
            parts = type(self._parts[0]).read([self._parts[number] for number in numbers]) if len(self) else []
            for number, (part, _) in zip(numbers, parts, strict=True):
                rows = np.flatnonzero(self._part == number)
                array[rows, : part.shape[1]] = part[self._row[rows]]
        return self._cache

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the cache, and with no more parts than these rows need."""
        numbers, part = np.unique(self._part, return_inverse=True)
        return StoredColumn, ([self._parts[number] for number in numbers], part, self._row, self._width, self._dtype)


Column = Tensor | StoredColumn


class Columns(dict[str, Any]):
    """Columns by name. Taking one out gives a tensor; `raw` gives them as they are."""

    def __getitem__(self, name: str) -> Any:
        return _tensor(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return _tensor(super().get(name, default))

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]

    @property
    def raw(self) -> dict[str, Column]:
        return dict(super().items())


def _tensor(column: Any) -> Any:
    return column.tensor() if isinstance(column, StoredColumn) else column


def to_stored(x: Tensor) -> Stored:
    """As NumPy's, which moves between processes without copying (torch tensors with two copies, ten times slower)."""
    x = x.detach().cpu()
    if x.dtype is torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy(), "bfloat16"
    return x.numpy(), None


def from_stored(array: np.ndarray, kind: str | None) -> Tensor:
    """The tensor. Arrays out of Ray's object store are read-only; torch has no such notion, so those are copied."""
    x = torch.from_numpy(array if array.flags.writeable else array.copy())
    return x.view(torch.bfloat16) if kind == "bfloat16" else x
