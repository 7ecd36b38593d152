"""The one thing that travels between roles: named per-sample tensors and objects, plus metadata of the whole.

Shapes: B samples. Every tensor's first dimension is B; every object list has B entries. Ragged token fields are
right-padded with zeros and `concat` widens them, so any batch size can be split over any number of workers and put
together in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


class Batch:
    """B samples as columns.

    `tensors[name]` is [B, ...], `objects[name]` a list of B Python objects, `meta` holds small facts about the batch
    as a whole (it is copied to every part of a split). Raises ValueError when the columns disagree about B.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | None = None,
        objects: Mapping[str, Sequence[Any]] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.tensors: dict[str, Tensor] = dict(tensors or {})
        self.objects: dict[str, list[Any]] = {k: list(v) for k, v in (objects or {}).items()}
        self.meta: dict[str, Any] = dict(meta or {})
        sizes = {k: len(v) for k, v in (*self.tensors.items(), *self.objects.items())}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"columns of one batch must have one length, got {sizes}")

    def __len__(self) -> int:
        column = next(iter((*self.tensors.values(), *self.objects.values())), ())
        return len(column)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors or name in self.objects

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        if len(self.tensors) + len(self.objects) and len(value) != len(self):
            raise ValueError(f"column '{name}' has {len(value)} rows, the batch has {len(self)}")
        self.tensors[name] = value

    def __repr__(self) -> str:
        shapes = ", ".join(f"{k}{list(v.shape)}" for k, v in self.tensors.items())
        return f"Batch({len(self)} samples; {shapes}; objects {list(self.objects)}; meta {self.meta})"

    def select(self, names: Iterable[str]) -> Batch:
        """The named columns only (tensors or objects), same rows, same meta."""
        names = list(names)
        missing = [n for n in names if n not in self]
        if missing:
            raise KeyError(f"batch has no column {missing}; it has {[*self.tensors, *self.objects]}")
        return Batch(
            {n: self.tensors[n] for n in names if n in self.tensors},
            {n: self.objects[n] for n in names if n in self.objects},
            self.meta,
        )

    def take(self, indices: Sequence[int] | Tensor) -> Batch:
        """The rows at `indices`, in that order (repetition allowed)."""
        index = torch.as_tensor(indices, dtype=torch.long)
        rows = index.tolist()
        return Batch(
            {k: v[index.to(v.device)] for k, v in self.tensors.items()},
            {k: [v[i] for i in rows] for k, v in self.objects.items()},
            self.meta,
        )

    def union(self, other: Batch) -> Batch:
        """Both batches' columns; on a name that both have, `other` wins. Rows must match in number."""
        return Batch({**self.tensors, **other.tensors}, {**self.objects, **other.objects}, {**self.meta, **other.meta})

    def repeat(self, n: int) -> Batch:
        """Every row n times in a row: [a, b] -> [a, a, b, b] for n = 2."""
        return self.take([i for i in range(len(self)) for _ in range(n)])

    def split(self, parts: Sequence[Sequence[int]]) -> list[Batch]:
        """One batch per list of row indices; lists may differ in length and may be empty."""
        return [self.take(p) for p in parts]

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
        columns = {frozenset((*b.tensors, *b.objects)) for b in full}
        if len(columns) > 1:
            raise ValueError(f"batches to concatenate have different columns: {[sorted(c) for c in columns]}")
        tensors = {k: _concat_padded([b.tensors[k] for b in full]) for k in full[0].tensors}
        objects = {k: [x for b in full for x in b.objects[k]] for k in full[0].objects}
        meta: dict[str, Any] = {}
        for b in batches:
            meta.update(b.meta)
        return Batch(tensors, objects, meta)

    # Ray moves NumPy arrays between processes without copying and torch tensors with two copies (ten times slower).
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"tensors": {k: _to_numpy(v) for k, v in self.tensors.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"tensors": {k: _from_numpy(*v) for k, v in state["tensors"].items()}}


def pad_rows(rows: Sequence[Sequence[float]], dtype: torch.dtype, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Lists of different lengths as one right-padded [B, W] tensor and their lengths [B]."""
    lengths = torch.tensor([len(r) for r in rows], dtype=torch.long)
    width = max(int(lengths.max()) if len(rows) else 0, width or 0)
    out = torch.zeros(len(rows), width, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return out, lengths


def _concat_padded(parts: list[Tensor]) -> Tensor:
    if parts[0].dim() < 2:
        return torch.cat(parts)
    width, later = max(p.shape[1] for p in parts), [0, 0] * (parts[0].dim() - 2)
    return torch.cat([functional.pad(p, [*later, 0, width - p.shape[1]]) for p in parts])


def _to_numpy(x: Tensor) -> tuple[np.ndarray, str | None]:
    x = x.detach().cpu()
    if x.dtype is torch.bfloat16:  # NumPy has no bfloat16
        return x.contiguous().view(torch.int16).numpy(), "bfloat16"
    return x.numpy(), None


def _from_numpy(array: np.ndarray, kind: str | None) -> Tensor:
    # Arrays out of Ray's object store are read-only; torch has no such notion, so those are copied.
    x = torch.from_numpy(array if array.flags.writeable else array.copy())
    return x.view(torch.bfloat16) if kind == "bfloat16" else x
