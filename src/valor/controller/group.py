"""What the trainer sees of a set of worker processes: roles with ordinary methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch

from valor.controller.placement import Placement, ResourcePool
from valor.data.balance import grouped, partition_groups, partition_rows
from valor.data.batch import Batch, Episodes
from valor.data.images import IMAGES
from valor.workers.dispatch import Dispatch, dispatch_of
from valor.workers.host import HOST, RoleSpec, Tracer

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Sink = Callable[[Any], None]
Feed = Callable[[int], Sequence[Any]]
"""The new messages for a rank."""
P = ParamSpec("P")
T = TypeVar("T")


class WorkerGroup(ABC):
    """Processes of one resource pool, each hosting every role in `specs`. Index by role name to call a role."""

    apart: ClassVar[bool] = False  # whether the ranks are processes of their own, which work beside this one

    def __init__(self, pool: ResourcePool, specs: dict[str, RoleSpec]) -> None:
        self.pool = pool
        self.specs = specs
        self.num_replacements = 0  # of processes that died
        self._layouts: list[dict[str, int]] | None = None

    def __getitem__(self, role: str) -> RoleHandle:
        return RoleHandle(self, role, self.specs[role].cls)

    @abstractmethod
    def run(
        self, role: str, method: str, calls: list[Arguments], sink: Sink | None = None, feed: Feed | None = None
    ) -> list[Any]:
        """Run `method` on every rank, rank i with `calls[i]`; results in rank order. Errors of a rank are raised.

        With a `sink` the method gets a keyword argument `sink`, and what it puts there on any rank arrives here one
        by one, in the calling thread, before `run` returns. With a `feed`, which comes with a sink, it also gets a
        keyword argument `feed`, a function that returns the messages for this rank that are new.
        """

    def start(self, role: str, method: str, calls: list[Arguments]) -> Callable[[], list[Any]]:
        """`run` in two parts: the function returned gives the results. Ranks that are processes of their own work
        meanwhile, and begin a call that is started then as soon as they have ended the one before."""
        results = self.run(role, method, calls)
        return lambda: results

    def settled(self, seconds: float) -> bool:
        """Whether every rank is free, at the latest after so many seconds, when a call has ended by an error."""
        return True

    def run_host(self, method: str, *args: Any) -> list[Any]:
        """A method of every rank's WorkerHost."""
        return self.run(HOST, method, [(args, {})] * self.pool.world_size)

    def data_parallel_ranks(self, role: str) -> list[int]:
        """For each process the number of its share of a batch; several may work on one share."""
        if self._layouts is None:
            self._layouts = self.run_host("layout")
        return [layout[role] for layout in self._layouts]

    @abstractmethod
    def close(self) -> None:
        """End the processes and give their resources back."""


class Pools:
    """The roles of a run, in whichever pool they live. Index by role name to call a role."""

    def __init__(self, placement: Placement, groups: dict[str, WorkerGroup]) -> None:
        self.placement = placement
        self._groups = groups
        # One thread a pool: calls that are submitted to a pool run in order, and beside those of other pools.
        self._threads = {
            name: ThreadPoolExecutor(1, thread_name_prefix=name)
            for name, group in groups.items()
            if len(groups) > 1 or group.apart
        }
        self._last: dict[str, Future[Any]] = {}  # submitted to each pool

    def __getitem__(self, role: str) -> RoleHandle:
        return self._groups[self.placement.pool_of(role)][role]

    def submit(self, role: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start `function`, which calls `role`, in that role's pool. In one process it has run when this returns."""
        pool = self.placement.pool_of(role)
        if pool in self._threads:
            self._last[pool] = self._threads[pool].submit(function, *args, **kwargs)
            return self._last[pool]
        done: Future[T] = Future()
        done.set_result(function(*args, **kwargs))
        return done

    @property
    def apart(self) -> bool:
        return any(group.apart for group in self._groups.values())

    @property
    def roles(self) -> list[str]:
        return [role for group in self._groups.values() for role in group.specs]

    def peak_memory(self) -> dict[str, float]:
        """GiB of the fullest rank in each kind of call since the last time, as metrics, from pools that are free."""
        peaks: dict[str, float] = {}
        for group in self._free():
            for of_rank in group.run_host("peak_memory"):
                peaks |= {call: max(peak, peaks.get(call, 0.0)) for call, peak in of_rank.items()}
        return peaks

    @contextmanager
    def traced(self, tracer: Tracer) -> Iterator[None]:
        """Trace the calls of the block, in the pools that are free when it begins."""
        free = self._free()
        for group in free:
            group.run_host("trace", tracer)
        yield
        for group in free:
            group.run_host("trace", None)

    def _free(self) -> list[WorkerGroup]:
        """Those that are not busy, and whose last call did not fail (its error is raised where its result is read)."""
        busy = [pool for pool, last in self._last.items() if not last.done() or last.exception() is not None]
        return [group for pool, group in self._groups.items() if pool not in busy]

    def close(self) -> None:
        """End all processes; the first pool, which may have started Ray, goes last."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)  # a call under way ends with its processes
        for group in reversed(self._groups.values()):
            group.close()


class RoleHandle:
    """A role as the trainer calls it: methods take and return whole batches, whichever ranks compute them.

    A `sink` argument receives what the method reports while it runs (`WorkerGroup.run`). `group`: the role's processes.
    """

    def __init__(self, group: WorkerGroup, role: str, cls: type) -> None:
        self.group, self._role, self._cls = group, role, cls

    def __getattr__(self, method: str) -> Callable[..., Any]:
        marked = dispatch_of(self._cls, method)
        if marked.mode == "all":
            return partial(self._call_all, method)
        return partial(self._call_dp, method, marked)

    def start(self, method: str, batch: Batch) -> Callable[[], Any]:
        """A `dp` method whose result is no batch, in two parts (`WorkerGroup.start`)."""
        results = self.group.start(self._role, method, self._shares(batch, dispatch_of(self._cls, method))[0])
        return lambda: results()[0]

    def _call_all(
        self, method: str, *args: Any, sink: Sink | None = None, feed: Feed | None = None, **kwargs: Any
    ) -> Any:
        calls = [(args, kwargs)] * self.group.pool.world_size
        return self.group.run(self._role, method, calls, sink, feed)[0]

    def _call_dp(
        self, method: str, marked: Dispatch, batch: Batch, *args: Any, sink: Sink | None = None, **kwargs: Any
    ) -> Any:
        calls, parts, ranks = self._shares(batch, marked, *args, **kwargs)
        results = self.group.run(self._role, method, calls, sink)
        if len(calls) == 1 or not isinstance(results[0], Batch):
            return results[0]
        shares = [results[ranks.index(rank)] for rank in range(len(parts))]
        result, order = Batch.concat(shares), torch.tensor([i for part in parts for i in part])
        if "episode" in result:  # rows of one episode stay together
            orders = [
                torch.tensor(part)[share["episode"]] for part, share in zip(parts, shares, strict=True) if len(share)
            ]
            result["episode"] = order = torch.cat(orders)
        return result.take(torch.argsort(order, stable=True))

    def _shares(
        self, batch: Batch, marked: Dispatch, *args: Any, **kwargs: Any
    ) -> tuple[list[Arguments], list[list[int]], list[int]]:
        """Each rank's arguments with its rows of the batch; the rows of each share, and the share of each rank."""
        if marked.reads:
            batch = batch.select([name for name in (*marked.reads, "episode", IMAGES) if name in batch])
        if self.group.pool.world_size == 1:
            return [((batch, *args), kwargs)], [list(range(len(batch)))], [0]
        ranks = self.group.data_parallel_ranks(self._role)
        parts = split_rows(batch, max(ranks) + 1, marked.keep_together)
        shares = batch.split(parts)
        return [((shares[rank], *args), kwargs) for rank in ranks], parts, ranks


def split_rows(batch: Batch, num_parts: int, keep_together: str | None) -> list[list[int]]:
    """Row indices of each part, balanced by prompt + response tokens; deterministic, parts may stay empty.

    Rows with the same value of `keep_together` go to the same part. Without it, episodes of one prompt stay together as
    long as that balances well: a part computes a prompt once.
    """
    prompt_tokens = batch["prompt_lengths"].tolist()
    tokens = prompt_tokens
    if "response_lengths" in batch:
        tokens = (batch["prompt_lengths"] + batch["response_lengths"]).tolist()
    if keep_together:
        units = [[[row] for row in rows] for rows in grouped(range(len(batch)), batch.objects[keep_together])]
        parts = partition_rows([sum(tokens[row] for [row] in unit) for unit in units], num_parts)
        chosen = [[units[unit] for unit in part] for part in parts]
    else:
        episodes = Episodes(batch).rows
        ids = batch["prompts"].numpy()
        prompts = [ids[rows[0], : prompt_tokens[rows[0]]].tobytes() for rows in episodes]

        def work(unit: Sequence[list[int]]) -> int:
            total = sum(tokens[row] for rows in unit for row in rows)
            return total - (len(unit) - 1) * prompt_tokens[unit[0][0]]

        chosen = partition_groups(grouped(episodes, prompts), work, num_parts)
    return [sorted(row for unit in part for rows in unit for row in rows) for part in chosen]
