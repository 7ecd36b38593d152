"""Micro-batches by token budget."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from valor.engines.microbatch import plan_micro_batches

LENGTHS = st.lists(st.integers(1, 50), max_size=30)


def test_long_rows_meet_long_rows():
    assert plan_micro_batches([3, 10, 4, 9], max_tokens=20) == [[1, 3], [2, 0]]


def test_a_row_beyond_the_budget_goes_alone():
    assert plan_micro_batches([5, 100, 5], max_tokens=20) == [[1], [0, 2]]


def test_rows_bound_without_tokens_bound():
    assert plan_micro_batches([1, 1, 1], max_rows=2) == [[0, 1], [2]]


def test_no_bound_is_one_micro_batch():
    assert plan_micro_batches([2, 3, 1]) == [[1, 0, 2]]


def test_no_rows_no_micro_batches():
    assert plan_micro_batches([], max_tokens=10) == []


@given(lengths=LENGTHS, max_tokens=st.integers(1, 200), max_rows=st.none() | st.integers(1, 8))
def test_every_row_once_and_within_bounds(lengths, max_tokens, max_rows):
    plan = plan_micro_batches(lengths, max_tokens=max_tokens, max_rows=max_rows)
    assert sorted(i for group in plan for i in group) == list(range(len(lengths)))
    for group in plan:
        longest = max(lengths[i] for i in group)
        assert len(group) == 1 or len(group) * longest <= max_tokens
        assert max_rows is None or len(group) <= max_rows


@given(lengths=LENGTHS, max_tokens=st.integers(1, 200))
def test_no_two_neighbours_could_be_one(lengths, max_tokens):
    plan = plan_micro_batches(lengths, max_tokens=max_tokens)
    for group, _ in pairwise(plan):
        assert (len(group) + 1) * lengths[group[0]] > max_tokens
