"""Phases of roles that live in different pools run at the same time; those of one pool one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from valor.controller import Pools

Result = TypeVar("Result")
Task = tuple[str, Callable[[], Result]]  # a role, and what is asked of it


def side_by_side(pools: Pools, tasks: Sequence[Task[Any]]) -> list[Any]:
    """Results of the tasks, in order. A thread for each further pool; what one raises is raised when all have ended."""
    queues: dict[str, list[int]] = {}
    for place, (role, _) in enumerate(tasks):
        queues.setdefault(pools.placement.pool_of(role), []).append(place)
    results: dict[int, Any] = {}

    def work(places: list[int]) -> None:
        for place in places:
            results[place] = tasks[place][1]()

    first, *others = queues.values() or [[]]
    with ThreadPoolExecutor(max(len(others), 1)) as threads:  # its end waits for all
        running: list[Future[None]] = [threads.submit(work, places) for places in others]
        work(first)
    for future in running:
        future.result()
    return [results[place] for place in range(len(tasks))]
