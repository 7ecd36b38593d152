"""Sampling: keyed order, no row twice in an epoch, exact resume."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valor.data.balance import partition_rows
from valor.data.sampler import PromptSampler, shuffled
from valor.errors import UserError


def test_order_depends_on_seed_and_epoch_alone() -> None:
    a, b = PromptSampler(50, 8, seed=3), PromptSampler(50, 8, seed=3)
    b.order(7)  # asking for another epoch first changes nothing
    for epoch in (0, 1, 5):
        assert a.order(epoch).tolist() == b.order(epoch).tolist()
        assert sorted(a.order(epoch).tolist()) == list(range(50))
    assert a.order(0).tolist() != a.order(1).tolist()
    assert a.order(0).tolist() != PromptSampler(50, 8, seed=4).order(0).tolist()


def test_order_is_pinned() -> None:
    # Ten numbers that must never change: a checkpoint made with an older version resumes on this order.
    assert shuffled(10, 42, 0).tolist() == [0, 1, 4, 2, 6, 8, 5, 9, 7, 3]


def test_positions_are_uniform() -> None:
    # 5 rows, 4000 epochs: each row is first 800 ± 25 times (one standard deviation).
    first = np.bincount([shuffled(5, 1, epoch)[0] for epoch in range(4000)], minlength=5)
    assert np.all(np.abs(first - 800) < 5 * 25)


@given(rows=st.integers(1, 60), batch=st.integers(1, 20), drop_last=st.booleans(), seed=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_no_row_twice_and_no_batch_across_its_end(
    rows: int, batch: int, drop_last: bool, seed: int
) -> None:
    if drop_last and rows < batch:
        with pytest.raises(UserError, match=f"{rows} prompts, fewer than one batch of {batch}"):
            PromptSampler(rows, batch, drop_last=drop_last)
        return
    sampler = PromptSampler(rows, batch, seed=seed, drop_last=drop_last)
    for epoch in range(3):
        drawn: list[int] = []
        for _ in range(sampler.steps_per_epoch):
            drawn += sampler.next_batch()
            assert sampler.epoch == epoch
        assert len(set(drawn)) == len(drawn) == (rows // batch * batch if drop_last else rows)


@given(st.integers(1, 25), st.integers(1, 7), st.booleans(), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_resume_is_exact(rows: int, batch: int, drop_last: bool, steps: int) -> None:
    rows = max(rows, batch)
    whole = PromptSampler(rows, batch, seed=9, drop_last=drop_last)
    for _ in range(steps):
        whole.next_batch()
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = PromptSampler(rows, batch, seed=9, drop_last=drop_last)
    resumed.load_state_dict(state)
    for _ in range(12):
        assert resumed.next_batch() == whole.next_batch()
    assert resumed.state_dict() == whole.state_dict()


def test_resume_with_another_batch_size_goes_on_where_it_was() -> None:
    a = PromptSampler(20, 4, seed=1)
    order = a.order(0).tolist()
    a.next_batch()
    b = PromptSampler(20, 6, seed=1)
    b.load_state_dict(a.state_dict())
    assert b.next_batch() == order[4:10]


def test_without_shuffling_rows_come_in_file_order() -> None:
    sampler = PromptSampler(5, 2, shuffle=False)
    assert [sampler.next_batch() for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]


def test_partition_by_hand() -> None:
    assert partition_rows([], 2) == [[], []]
    assert partition_rows([5], 3) == [[0], [], []]
    assert partition_rows([8, 7, 6, 5, 4], 1) == [[0, 1, 2, 3, 4]]
    # The example of Karmarkar and Karp: the difference is 2 (16 and 14), greedy gives 4.
    sums = sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in partition_rows([8, 7, 6, 5, 4], 2))
    assert sums == [14, 16]


@given(st.lists(st.integers(0, 2000), max_size=80), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_partition_is_complete_even_and_deterministic(work: list[int], parts: int) -> None:
    split = partition_rows(work, parts)
    assert len(split) == parts
    assert sorted(i for part in split for i in part) == list(range(len(work)))
    assert all(part == sorted(part) for part in split)
    sums = [sum(work[i] for i in part) for part in split]
    assert max(sums) - min(sums) <= max(work, default=0)
    assert split == partition_rows(work, parts)


def test_partition_of_many_token_counts_is_nearly_perfect() -> None:
    work = np.random.default_rng(0).lognormal(5, 1, 1024).astype(int).tolist()
    sums = [sum(work[i] for i in part) for part in partition_rows(work, 8)]
    assert (max(sums) - min(sums)) / max(sums) < 0.001
