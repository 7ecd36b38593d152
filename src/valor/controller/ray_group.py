"""Roles as Ray actors: one process a rank, placed by a placement group."""

from __future__ import annotations

import itertools
import os
import socket
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import ray
import torch
from ray.exceptions import GetTimeoutError, NodeDiedError, OutOfMemoryError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from valor.controller.cluster import bundle, check_nodes, cluster_is_gone, start_or_join
from valor.controller.group import Arguments, Feed, Sink, WorkerGroup
from valor.controller.placement import ResourcePool
from valor.data.batch import Batch
from valor.data.stored import Part, Stored, StoredColumn, to_stored
from valor.errors import TrainingStopped, UserError, WorkerDied, WorkersReplaced
from valor.tracking.progress import Phase, begin_call, call_progress, relay
from valor.workers.dispatch import dispatch_of
from valor.workers.host import HOST, RoleSpec, WorkerHost

_POLL_SECONDS = 0.5
_FEED_SECONDS = 0.05  # the same, where ranks wait for messages
_PLACEMENT_SECONDS = 120.0
_CLOSE_SECONDS = 10.0
_DEATH_SECONDS = 30.0  # in which Ray notices that a node is gone
_DEATHS = (RayActorError, OutOfMemoryError, NodeDiedError)
_MOST_REPLACEMENTS = 20  # of a pool's processes in a run: the cause of so many deaths will not go away


class _RayHost(WorkerHost):
    """A WorkerHost in a Ray process. While a call runs, the driver polls a second thread: for the call's progress, for
    the items of its sink, and to bring the messages of its feed."""

    def __init__(self, rank: int, pool: ResourcePool) -> None:
        self._failed = -1  # `failed` of the last call that failed on this rank
        self._items: dict[int, deque[Any]] = {}  # of sinks, by the number of the call
        self._messages: dict[int, deque[Any]] = {}
        gpu = own_gpu() if pool.device == "cuda" else 0
        super().__init__(
            rank, pool.world_size, pool.device, pool.num_threads, deterministic=pool.deterministic, gpu=gpu
        )

    def address(self) -> tuple[str, int]:
        """This node's address and a free port; rank 0's are where it will listen."""
        node = ray.util.get_node_ip_address()
        for backend in ("GLOO", "NCCL"):  # which go by the host's name, and that often means 127.0.0.1
            os.environ.setdefault(f"{backend}_SOCKET_IFNAME", _interface(node))
        with socket.socket() as s:
            s.bind(("", 0))
            return node, s.getsockname()[1]

    def call(
        self,
        role: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        failed: int = 0,
        stays: Sequence[str] = (),
        number: int | None = None,
        has_feed: bool = False,
    ) -> Any:
        """`number`: of a call that has a sink. `stays`: columns of the result that are results of their own.

        `failed`: how many calls had failed, as far as the driver knew when it sent this one. A call that it sent before
        it knew of a failure of this rank is refused: the other ranks may still wait in the call that failed.
        """
        if failed == self._failed:
            raise RuntimeError("the call before has failed")
        begin_call()
        if number is not None:
            kwargs = {**kwargs, "sink": self._items.setdefault(number, deque()).append}
        if number is not None and has_feed:
            kwargs["feed"] = partial(_drain, self._messages.setdefault(number, deque()))
        args = tuple(arg.to("cpu") if isinstance(arg, Batch) else arg for arg in args)  # reads stored columns
        before, self._failed = self._failed, failed
        result = super().call(role, method, *args, **kwargs)
        self._failed = before
        if not stays:
            return result
        columns = [result.tensors.pop(name, None) for name in stays]
        kinds = [None if column is None else (tuple(column.shape), column.dtype) for column in columns]
        return (result, kinds), *(None if column is None else to_stored(column) for column in columns)

    @ray.method(concurrency_group="poll")
    def poll(
        self, number: int | None, last: bool = False, messages: Sequence[Any] = ()
    ) -> tuple[Phase | None, list[Any]]:
        """Progress, and the new items of call `number`, which gets `messages`. `last`: the call has ended."""
        if number is None:
            return call_progress(), []
        if messages:  # perhaps before the call has begun
            self._messages.setdefault(number, deque()).extend(messages)
        items = _drain(self._items.get(number, deque()))
        if last:
            self._items.pop(number, None)
            self._messages.pop(number, None)
        return call_progress(), items


@dataclass(frozen=True)
class _RayPart(Part):
    """A tensor in Ray's object store, where it stays if the process that computed it dies."""

    ref: Any
    shape: tuple[int, int]
    dtype: torch.dtype

    @staticmethod
    def read(parts: Sequence[_RayPart]) -> list[Stored]:
        return ray.get([part.ref for part in parts])


class RayGroup(WorkerGroup):
    """One Ray actor for each rank of the pool."""

    apart = True

    def __init__(self, pool: ResourcePool, specs: dict[str, RoleSpec], ray_init: dict[str, Any]) -> None:
        super().__init__(pool, specs)
        self._actors: list[Any] = []
        self._nodes: list[str] = []  # each rank's
        self._placement: PlacementGroup | None = None
        self._numbers = itertools.count()  # of calls with a sink
        self._failed = 0  # how many calls have failed
        self._unfinished: set[Any] = set()  # results of calls that go on, or that have ended by an error
        self._watchdog = None if ray.is_initialized() else start_or_join(pool, ray_init)
        try:
            check_nodes(pool)
            self._start()
        except BaseException:  # a model that cannot be loaded, Ctrl-C: no process and no reservation stays behind
            self.close()
            raise

    def _start(self) -> None:
        """Processes with all roles in them."""
        self._place()
        addresses = self._get([a.address.remote() for a in self._actors])
        self._nodes = [node for node, _ in addresses]
        address, port = addresses[0]
        self._get([a.connect.remote(address, port) for a in self._actors])
        self._get([a.build.remote(self.specs) for a in self._actors])

    def _place(self) -> None:
        """Reserve the pool's resources and start a process on each bundle. UserError when they are not to be had."""
        pool = self.pool
        strategy = "STRICT_SPREAD" if pool.num_nodes > 1 else "PACK"
        self._placement = placement_group([bundle(pool)] * pool.num_nodes, strategy=strategy)
        if not self._placement.wait(_PLACEMENT_SECONDS):
            raise UserError(
                f"{pool} did not come free on the Ray cluster within {_PLACEMENT_SECONDS:.0f} s, other runs hold the "
                "rest: wait for their end, or ask for less with trainer.n_gpus_per_node and nnodes"
            )
        bundles = self._bundles()
        actor_class: Any = ray.remote(concurrency_groups={"poll": 1})(_RayHost)  # type: ignore[call-overload]
        self._actors = [
            actor_class.options(
                num_cpus=pool.num_threads,
                num_gpus=1 if pool.device == "cuda" else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=bundles[rank // pool.processes_per_node]
                ),
            ).remote(rank, pool)
            for rank in range(pool.world_size)
        ]

    def _bundles(self) -> list[int]:
        """The bundles in the order of the ranks: this node's first, the others' by address."""
        assert self._placement is not None
        node_of: dict[int, str] = ray.util.placement_group_table(self._placement)["bundles_to_node_id"]
        address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        here = ray.get_runtime_context().get_node_id()
        return sorted(node_of, key=lambda i: (node_of[i] != here, address[node_of[i]], i))

    def run(
        self, role: str, method: str, calls: list[Arguments], sink: Sink | None = None, feed: Feed | None = None
    ) -> list[Any]:
        """Processes that died are replaced, where their roles can be, and the call is repeated.

        WorkersReplaced, once they are, when the call needs weights that were sent before.
        """
        try:
            return self._run(role, method, calls, sink, feed)
        except WorkerDied as death:
            if not all(spec.replaceable for spec in self.specs.values()):
                raise
            self._replace(death)
            if role in self.specs and dispatch_of(self.specs[role].cls, method).sent_weights:
                raise WorkersReplaced(f"{death.what}: new ones have taken their place") from None
            return self.run(role, method, calls, sink, feed)

    def start(self, role: str, method: str, calls: list[Arguments]) -> Callable[[], list[Any]]:
        started = self._send(role, method, calls)
        self._unfinished.update(started)
        return lambda: self._get(started)

    def _send(
        self, role: str, method: str, calls: Sequence[Sequence[Any]], stays: Sequence[str] = (), *more: Any
    ) -> list[Any]:
        """Of each rank the reference to its result; with `stays` a list of that and of those to its columns."""
        pairs, count = zip(self._actors, calls, strict=True), 1 + len(stays)
        more = self._failed, stays, *more
        return [a.call.options(num_returns=count).remote(role, method, *c, *more) for a, c in pairs]

    def _replace(self, death: WorkerDied) -> None:
        """New processes; also where one of them dies while it starts."""
        if self.num_replacements == _MOST_REPLACEMENTS:
            raise death
        self.num_replacements += 1
        self._end_processes()
        try:
            self._start()
        except WorkerDied as again:
            self._replace(again)

    def _run(self, role: str, method: str, calls: list[Arguments], sink: Sink | None, feed: Feed | None) -> list[Any]:
        # The same arguments for every rank are stored once and shared.
        if sink is None and len(calls) > 1 and all(c is calls[0] for c in calls):
            args, kwargs = calls[0]
            refs = [ray.put(args), ray.put(kwargs)]
            return self._get(self._send(role, method, [refs] * len(calls)))
        number = None if sink is None else next(self._numbers)
        stays = () if role == HOST else dispatch_of(self.specs[role].cls, method).stays
        started = self._send(role, method, calls, stays, number, feed is not None)
        if not stays:
            return self._get(started, number, sink, feed)
        results = self._get([result for result, *_ in started], number, sink, feed)
        for (batch, kinds), (_, *refs) in zip(results, started, strict=True):
            for name, kind, ref in zip(stays, kinds, refs, strict=True):
                if kind is not None:
                    batch[name] = StoredColumn.of(_RayPart(ref, *kind))
        return [batch for batch, _ in results]

    def settled(self, seconds: float) -> bool:
        return _ended(self._unfinished, seconds)

    def _end_processes(self) -> None:
        actors, self._actors, unfinished, self._unfinished = self._actors, [], self._unfinished, set()
        if cluster_is_gone():
            return
        try:
            if self._nodes and _ended(unfinished, 0.1):  # what roles have started, and shared memory, goes with them
                _ended([actor.close.remote() for actor in actors], _CLOSE_SECONDS)
        finally:
            for actor in actors:
                ray.kill(actor)
        if self._placement is not None:
            remove_placement_group(self._placement)

    def close(self) -> None:
        self._end_processes()
        if self._watchdog is not None:
            if not cluster_is_gone():
                ray.shutdown()
            self._watchdog.close()

    def _get(
        self, refs: list[Any], number: int | None = None, sink: Sink | None = None, feed: Feed | None = None
    ) -> list[Any]:
        """Results in order; progress, items of the sink and messages of the feed are passed on meanwhile.

        A rank's error is raised as its own type: UserError, TrainingStopped, WorkerDied where a process has died.
        """
        self._unfinished.update(refs)
        try:
            results = self._wait(refs, number, sink, feed)
        except RayTaskError as error:
            self._failed += 1
            if isinstance(error.cause, UserError | TrainingStopped):
                raise error.cause from None
            self._raise_death(error)  # the other ranks complain that one does not answer
            raise error from None
        except _DEATHS as error:
            self._raise_death(error)
            raise WorkerDied(f"a worker process died ({_cause_of(error)})") from error
        self._unfinished.difference_update(refs)
        return results

    def _wait(self, refs: list[Any], number: int | None, sink: Sink | None, feed: Feed | None) -> list[Any]:
        waiting, results = list(refs), {}
        while waiting:
            seconds = _POLL_SECONDS if feed is None else _FEED_SECONDS
            ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=seconds)
            # Raises now, while the other ranks may wait for the failed one.
            results |= zip(ready, ray.get(ready), strict=True)
            if waiting or sink is not None:
                # Messages that come after the end are for the next call.
                messages = [feed(rank) if feed and waiting else () for rank in range(len(self._actors))]
                polled = zip(self._actors, messages, strict=True)
                seen = ray.get([a.poll.remote(number, not waiting, to_rank) for a, to_rank in polled])
                relay([progress for progress, _ in seen])
                for item in (item for _, items in seen for item in items):
                    sink(item)  # type: ignore[misc]  # without a sink there are no items
        return [results[ref] for ref in refs]

    def _raise_death(self, error: Exception) -> None:
        """WorkerDied where the process of a rank has died, as soon as Ray knows."""
        probes = [actor.poll.remote(None) for actor in self._actors]
        for rank, probe in enumerate(probes):
            try:
                ray.get(probe, timeout=_DEATH_SECONDS)
            except _DEATHS as death:
                node = f" on node {self._nodes[rank]}" if rank < len(self._nodes) else ""
                raise WorkerDied(f"the process of rank {rank}{node} died ({_cause_of(death)})") from error
            except GetTimeoutError:
                continue


def _cause_of(death: Exception) -> str:
    by_ray = isinstance(death, OutOfMemoryError)
    return "Ray did it, as its node's memory was full" if by_ray else "the node itself, a kill, or no memory left"


def _ended(refs: Collection[Any], seconds: float) -> bool:
    """Whether all these calls end, well or by an error, in so many seconds."""
    return not refs or not ray.wait([*refs], num_returns=len(refs), timeout=seconds, fetch_local=False)[1]


def _drain(items: deque[Any]) -> list[Any]:
    return [items.popleft() for _ in range(len(items))]


def own_gpu() -> int:
    """The number, among the GPUs that this process sees, of the one that Ray has given it.

    It sees no other one, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set.
    """
    gpu, seen = str(ray.get_gpu_ids()[0]), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return seen.index(gpu) if gpu in seen else int(gpu)


def _interface(address: str) -> str:
    """The network interface that has this address."""
    interfaces = psutil.net_if_addrs().items()
    return next(name for name, addresses in interfaces if any(each.address == address for each in addresses))
