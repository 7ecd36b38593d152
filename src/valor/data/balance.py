"""Rows over ranks so that every rank has about the same work."""

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import itemgetter
from typing import TypeVar

T = TypeVar("T")
_Split = list[tuple[float, list[int]]]


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
    lists = [sorted(rows) for _, rows in heap[0][2]]
    return [*lists, *([] for _ in range(parts - len(lists)))]


def _merge(first: _Split, second: _Split, parts: int) -> None:
    """Add `second` to `first`: the heaviest part of one goes with the lightest of the other, empty ones included."""
    light = second[::-1]
    alone = parts - len(second)  # so many parts of `first` meet an empty one
    merged = []
    for (a, x), (b, y) in zip(first[alone:], light, strict=False):
        long, short = (x, y) if len(x) >= len(y) else (y, x)
        long.extend(short)  # in place: copying the long one at every merge would take quadratic time
        merged.append((a + b, long))
    first[alone:] = merged + light[len(merged) :]
    first.sort(key=itemgetter(0))


def grouped(items: Iterable[T], keys: Iterable[Hashable]) -> list[list[T]]:
    """Items with the same key in one list; lists and items in the given order."""
    groups: dict[Hashable, list[T]] = {}
    for item, key in zip(items, keys, strict=True):
        groups.setdefault(key, []).append(item)
    return list(groups.values())


def partition_groups(
    groups: Sequence[Sequence[T]], work: Callable[[Sequence[T]], float], parts: int
) -> list[list[Sequence[T]]]:
    """Groups split into `parts` lists with even sums of `work`; groups are halved while that lowers the maximum."""
    size = max(map(len, groups), default=1)
    best: tuple[float, list[list[Sequence[T]]]] | None = None
    while best is None or size >= 1:
        units = [group[i : i + size] for group in groups for i in range(0, len(group), size)]
        amounts = [work(unit) for unit in units]
        lists = partition_rows(amounts, parts)
        most = max(sum(amounts[i] for i in numbers) for numbers in lists)
        if best is not None and most >= best[0]:
            break
        best = most, [[units[i] for i in numbers] for numbers in lists]
        size //= 2
    return best[1]
