"""Rows over ranks so that every rank has about the same work."""

import heapq
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import itemgetter
from typing import TypeVar

T = TypeVar("T")
_Split = list[tuple[float, list[int]]]
_amount = itemgetter(0)
_FEW = 16  # parts that are faster inserted than sorted in


def partition_rows(work: Sequence[float], parts: int) -> list[list[int]]:
    """Row numbers split into `parts` lists with even sums of `work`; counts may differ, lists may be empty.

    Largest differencing method (Karmarkar and Karp, 1982), k-way: the two partial splits that are least even are
    merged again and again, the heaviest part of one with the lightest of the other. Deterministic; each list ascends.
    """
    # A partial split is (-spread, age, its parts that have rows, from heavy to light, as (-sum, rows)); age makes ties
    # deterministic.
    heap: list[tuple[float, int, _Split]] = [
        (-amount if parts > 1 else 0.0, row, [(-amount, [row])]) for row, amount in enumerate(work)
    ]
    if not heap:
        return [[] for _ in range(parts)]
    heapq.heapify(heap)
    age = len(heap)
    while len(heap) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        _merge(first, second, parts)
        heapq.heappush(heap, (first[0][0] - (first[-1][0] if len(first) == parts else 0.0), age, first))
        age += 1
    found = [sorted(rows) for _, rows in heap[0][2]]
    return [*found, *([] for _ in range(parts - len(found)))]


def _merge(first: _Split, second: _Split, parts: int) -> None:
    """Add `second` to `first`: the heaviest part of one goes with the lightest of the other, empty ones included."""
    light = second[::-1]
    alone = parts - len(second)  # so many parts of `first` meet an empty one
    met = [(a + b, _joined(x, y)) for (a, x), (b, y) in zip(first[alone:], light, strict=False)]
    added = met + light[len(met) :]
    del first[alone:]
    if len(added) < _FEW:
        for part in added:
            insort(first, part, key=_amount)
    else:
        first += added
        first.sort(key=_amount)


def grouped(items: Iterable[T], keys: Iterable[Hashable]) -> list[list[T]]:
    """Items with the same key in one list; lists and items in the given order."""
    found: dict[Hashable, list[T]] = {}
    for item, key in zip(items, keys, strict=True):
        found.setdefault(key, []).append(item)
    return list(found.values())


def partition_groups(
    groups: Sequence[Sequence[T]], work: Callable[[Sequence[T]], float], parts: int
) -> list[list[Sequence[T]]]:
    """Groups split into `parts` lists with even sums of `work`. They are cut into halves, quarters … as long as the
    list with the most work then has less, whatever the pieces of a group cost more than the whole."""
    size = max(map(len, groups), default=1)
    best: tuple[float, list[list[Sequence[T]]]] | None = None
    while best is None or size >= 1:
        units = [group[i : i + size] for group in groups for i in range(0, len(group), size)]
        amounts = [work(unit) for unit in units]
        lists = partition_rows(amounts, parts)
        most = max(sum(amounts[i] for i in one) for one in lists)
        if best is not None and most >= best[0]:
            break
        best = most, [[units[i] for i in one] for one in lists]
        size //= 2
    return best[1]


def _joined(a: list[int], b: list[int]) -> list[int]:
    long, short = (a, b) if len(a) >= len(b) else (b, a)
    long.extend(short)  # in place: copying the long one at every merge would take quadratic time
    return long
