"""Rows over ranks: the differencing method, against its definition with every part written out."""

import heapq
import random
import time

from valor.data.balance import partition_rows


def by_definition(work: list[int], parts: int) -> list[list[int]]:
    """Every partial split has all its parts, the empty ones too."""
    heap = [(-w, i, [(w, [i]), *((0, []) for _ in range(parts - 1))]) for i, w in enumerate(work)]
    heapq.heapify(heap)
    for age in range(len(work), 2 * len(work) - 1):
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, second[::-1], strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], age, merged))
    return [sorted(rows) for _, rows in heap[0][2]]


def test_it_is_the_differencing_method():
    draw = random.Random(0)
    for _ in range(300):
        most = draw.choice([1, 3, 1000])
        work = [draw.randint(1, most) for _ in range(draw.randint(1, 60))]
        parts = draw.randint(2, 40)
        assert partition_rows(work, parts) == by_definition(work, parts), (work, parts)


def test_a_thousand_parts_cost_no_more_than_a_few():
    """By the definition 2,048 rows over 1,024 parts take seconds."""
    work = [random.Random(1).randint(2000, 8000) for _ in range(2048)]
    began = time.process_time()
    found = partition_rows(work, 1024)
    assert time.process_time() - began < 0.5
    assert sorted(row for rows in found for row in rows) == list(range(2048))
