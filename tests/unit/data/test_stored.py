"""Columns by reference: the same rows as columns in memory, of which no more is read than is needed."""

import pickle
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from valor.data.batch import Batch
from valor.data.stored import Part, StoredColumn, to_stored


@dataclass(frozen=True)
class InStore(Part):
    """A part in this process."""

    number: int
    shape: tuple[int, int]
    dtype: torch.dtype
    store: ClassVar[list[Tensor]] = []
    reads: ClassVar[list[int]] = []

    @staticmethod
    def read(parts: Any) -> Any:
        InStore.reads += [part.number for part in parts]
        return [to_stored(InStore.store[part.number]) for part in parts]


@pytest.fixture(autouse=True)
def empty_store() -> None:
    InStore.store.clear()
    InStore.reads.clear()


def stored(x: Tensor) -> StoredColumn:
    InStore.store.append(x)
    return StoredColumn.of(InStore(len(InStore.store) - 1, (x.shape[0], x.shape[1]), x.dtype))


def both(sizes: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> tuple[Batch, Batch]:
    """The same parts [R, W] joined: in memory, and by reference."""
    parts = [torch.randn(size).to(dtype) for size in sizes]
    rows = [torch.arange(len(x)) for x in parts]
    plain = Batch.concat([Batch({"x": x, "row": row}) for x, row in zip(parts, rows, strict=True)])
    return plain, Batch.concat([Batch({"x": stored(x), "row": row}) for x, row in zip(parts, rows, strict=True)])


def is_same(a: Batch, b: Batch) -> bool:
    return a["x"].shape == b["x"].shape and a["x"].dtype == b["x"].dtype and torch.equal(a["x"], b["x"])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=5), st.data())
def test_every_operation_gives_the_rows_that_it_gives_in_memory(sizes, data):
    plain, far = both(sizes)
    index = data.draw(st.lists(st.integers(0, len(plain) - 1), min_size=1, max_size=12))
    cut = data.draw(st.integers(0, len(index)))
    if data.draw(st.booleans()):
        far["x"]  # what was read before is used again
    for change in (
        lambda batch: batch.take(index),
        lambda batch: batch.take(index).take(range(cut)),
        lambda batch: batch.repeat(2),
        lambda batch: batch.split([index[:cut], index[cut:]])[1],
        lambda batch: Batch.concat([batch.take(index), batch]),
        lambda batch: pickle.loads(pickle.dumps(batch.take(index))),
        lambda batch: pickle.loads(pickle.dumps(batch)).split([[], index])[0],
        lambda batch: batch.select(["x"]).union(Batch({"y": torch.zeros(len(batch))})).to("cpu"),
    ):
        assert is_same(change(plain), change(far))


def test_bfloat16_and_other_kinds_keep_theirs():
    for dtype in (torch.bfloat16, torch.int64, torch.float64):
        plain, far = both([(2, 3), (1, 5)], dtype)
        assert is_same(plain, far)


def test_a_reference_joins_what_lies_in_memory():
    plain, far = both([(2, 3)])
    assert is_same(Batch.concat([plain, plain]), Batch.concat([far, plain]))


def test_choosing_reads_nothing_and_reading_reads_what_is_chosen_once():
    _, far = both([(2, 3), (2, 4), (2, 2)])
    chosen = far.take([5, 0, 4])
    assert len(chosen) == 3 and "x" in chosen and chosen.tensors.raw["x"].shape == (3, 4)
    sent = pickle.loads(pickle.dumps(chosen.split([[0, 2], [1]])[0]))
    assert InStore.reads == []
    assert len(sent.tensors.raw["x"]._parts) == 1 and sent["x"].shape == (2, 4)
    assert InStore.reads == [2]
    first = far["x"]
    assert sorted(InStore.reads) == [0, 1, 2, 2] and far["x"] is first
    assert torch.equal(far.take([1, 3])["x"], first[[1, 3]]) and len(InStore.reads) == 4


def test_what_was_read_does_not_travel():
    _, far = both([(4, 1000)])
    assert np.isfinite(far["x"].numpy()).all() and len(pickle.dumps(far)) < 1500
