"""The batch: columns stay rows' columns through every operation, whatever the sizes."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from valor.data.batch import Batch, pad_rows


def make(lengths: list[int]) -> Batch:
    rows = [list(range(10 * i, 10 * i + n)) for i, n in enumerate(lengths)]
    responses, response_lengths = pad_rows(rows, torch.long)
    return Batch(
        {"responses": responses, "response_lengths": response_lengths, "score": torch.arange(len(lengths)).float()},
        {"uid": [f"u{i}" for i in range(len(lengths))]},
        {"temperature": 0.5},
    )


def test_columns_of_different_length_are_refused():
    with pytest.raises(ValueError, match="one length"):
        Batch({"a": torch.zeros(2)}, {"b": [1, 2, 3]})
    with pytest.raises(ValueError, match="3 rows"):
        make([1, 2])["x"] = torch.zeros(3)


def test_take_keeps_tensors_and_objects_together():
    batch = make([1, 2, 3]).take([2, 0, 2])
    assert batch.objects["uid"] == ["u2", "u0", "u2"]
    assert batch["score"].tolist() == [2, 0, 2]
    assert batch.meta == {"temperature": 0.5}


def test_repeat_puts_copies_next_to_each_other():
    assert make([1, 1]).repeat(3).objects["uid"] == ["u0"] * 3 + ["u1"] * 3


def test_select_names_what_is_missing():
    with pytest.raises(KeyError, match="nothing"):
        make([1]).select(["score", "nothing"])


def test_concat_pads_to_the_widest():
    joined = Batch.concat([make([1, 2]), make([5])])
    assert joined["responses"].shape == (3, 5)
    assert joined["responses"][0].tolist() == [0, 0, 0, 0, 0]
    assert joined["responses"][2].tolist() == [0, 1, 2, 3, 4]


def test_concat_refuses_to_lose_a_column():
    with pytest.raises(ValueError, match="different columns"):
        Batch.concat([make([1]), make([1]).select(["score"])])


def test_union_prefers_the_newer_column():
    batch = make([1, 1]).union(Batch({"score": torch.tensor([7.0, 8.0])}))
    assert batch["score"].tolist() == [7, 8]
    assert "responses" in batch


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    world_size=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_any_split_over_any_number_of_workers_is_undone_by_concat(lengths, world_size, seed):
    """No equal-chunk rule: parts of any size, empty ones too, give the batch back in the original order."""
    batch = make(lengths)
    owner = torch.randint(world_size, (len(lengths),), generator=torch.Generator().manual_seed(seed)).tolist()
    parts = [[i for i, o in enumerate(owner) if o == rank] for rank in range(world_size)]
    shards = batch.split(parts)
    order = torch.argsort(torch.tensor([i for p in parts for i in p]))
    back = Batch.concat(shards).take(order)
    width = max(lengths)
    assert torch.equal(back["responses"][:, :width], batch["responses"][:, :width])
    assert back.objects == batch.objects


def test_pickling_keeps_every_dtype_bit_for_bit():
    batch = Batch(
        {
            "half": torch.randn(3, 4).bfloat16(),
            "float": torch.randn(3),
            "long": torch.arange(3),
            "bool": torch.tensor([True, False, True]),
        },
        {"any": [None, {"a": 1}, "x"]},
        {"step": 3},
    )
    back = pickle.loads(pickle.dumps(batch))
    for name, tensor in batch.tensors.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)
    assert back.objects == batch.objects and back.meta == batch.meta
    back["float"][0] = 5.0  # still writable


def test_an_empty_batch_is_a_batch():
    empty = make([1, 2]).take([])
    assert len(empty) == 0
    assert len(Batch.concat([empty, make([1])])) == 1
