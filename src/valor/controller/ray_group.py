"""Roles as Ray actors: one process a rank, placed by a placement group. The only file that imports ray."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import psutil
import ray
import torch
from ray._private import services
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from valor.controller.group import Call, Feed, Sink, WorkerGroup
from valor.controller.placement import ResourcePool, available_cores
from valor.controller.watchdog import Watchdog, start_ray
from valor.data.batch import Batch
from valor.data.stored import Part, Stored, StoredColumn, to_stored
from valor.errors import TrainingStopped, UserError, WorkerDied, WorkersReplaced
from valor.tracking.progress import Latest, Progress, add_listener, relay
from valor.workers.dispatch import dispatch_of
from valor.workers.host import HOST, RoleSpec, WorkerHost

_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 5.0  # in which the head of a cluster answers
_FEED_SECONDS = 0.05  # where ranks wait for what they are to be told
_PLACEMENT_SECONDS = 120.0
_DEATH_SECONDS = 30.0  # in which Ray notices that a node is gone
_MOST_REPLACEMENTS = 20  # of a pool's processes in a run: they die of something that stays


class _RayHost(WorkerHost):
    """A WorkerHost in a Ray process. On a second thread the driver polls it while a call runs: for the progress of the
    call, for what the call has put into its sink since the last time, and to bring what the call is fed."""

    def __init__(self, rank: int, pool: ResourcePool) -> None:
        self._latest = Latest()
        add_listener(self._latest)
        self._reported: dict[int, deque[Any]] = {}  # by the number of the call
        self._brought: dict[int, deque[Any]] = {}
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
        stays: Sequence[str] = (),
        number: int | None = None,
        fed: bool = False,
    ) -> Any:
        """`number`: of a call that has a sink. `stays`: columns of the result that are results of their own."""
        self._latest.begin()
        if number is not None:
            kwargs = {**kwargs, "sink": self._reported.setdefault(number, deque()).append}
        if number is not None and fed:
            kwargs["feed"] = partial(_drain, self._brought.setdefault(number, deque()))
        args = tuple(arg.to("cpu") if isinstance(arg, Batch) else arg for arg in args)  # reads what lies elsewhere
        result = super().call(role, method, *args, **kwargs)
        if not stays:
            return result
        columns = [result.tensors.pop(name, None) for name in stays]
        kinds = [None if column is None else (tuple(column.shape), column.dtype) for column in columns]
        return (result, kinds), *(None if column is None else to_stored(column) for column in columns)

    @ray.method(concurrency_group="poll")
    def poll(
        self, number: int | None, last: bool = False, brought: Sequence[Any] = ()
    ) -> tuple[Progress | None, list[Any]]:
        """Progress, and what call `number`, which is `brought` something, has reported since the last time.

        `last`: the call has ended.
        """
        if number is None:
            return self._latest.report, []
        if brought:  # perhaps before the call has begun
            self._brought.setdefault(number, deque()).extend(brought)
        items = _drain(self._reported.get(number, deque()))
        if last:
            self._reported.pop(number, None)
            self._brought.pop(number, None)
        return self._latest.report, items


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
        self._unfinished: list[Any] = []  # results of the last call that ended by an error
        self._own_ray = None if ray.is_initialized() else _start_ray(pool, ray_init)
        try:
            _check_nodes(pool)
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
        pool, cpus = self.pool, self.pool.num_threads
        each, bundle = pool.processes_per_node, _bundle(pool)
        strategy = "STRICT_SPREAD" if pool.num_nodes > 1 else "PACK"
        self._placement = placement_group([bundle] * pool.num_nodes, strategy=strategy)
        if not self._placement.wait(_PLACEMENT_SECONDS):
            raise UserError(
                f"{pool} did not come free on the Ray cluster within {_PLACEMENT_SECONDS:.0f} s, other runs hold the "
                "rest: wait for their end, or ask for less with trainer.n_gpus_per_node and nnodes"
            )
        bundles = self._bundles()
        actor_class: Any = ray.remote(concurrency_groups={"poll": 1})(_RayHost)  # type: ignore[call-overload]
        self._actors = [
            actor_class.options(
                num_cpus=cpus,
                num_gpus=1 if pool.device == "cuda" else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=bundles[rank // each]
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
        self, role: str, method: str, calls: list[Call], sink: Sink | None = None, feed: Feed | None = None
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

    def start(self, role: str, method: str, calls: list[Call]) -> Callable[[], list[Any]]:
        started = self._send(role, method, calls)
        return lambda: self._get(started)

    def _send(
        self, role: str, method: str, calls: Sequence[Sequence[Any]], stays: Sequence[str] = (), *more: Any
    ) -> list[Any]:
        """Of each rank the reference to its result; with `stays` a list of that and of those to its columns."""
        pairs, count = zip(self._actors, calls, strict=True), 1 + len(stays)
        return [a.call.options(num_returns=count).remote(role, method, *c, stays, *more) for a, c in pairs]

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

    def _run(self, role: str, method: str, calls: list[Call], sink: Sink | None, feed: Feed | None) -> list[Any]:
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
        found = self._get([result for result, *_ in started], number, sink, feed)
        for (batch, kinds), (_, *refs) in zip(found, started, strict=True):
            for name, kind, ref in zip(stays, kinds, refs, strict=True):
                if kind is not None:
                    batch[name] = StoredColumn.of(_RayPart(ref, *kind))
        return [batch for batch, _ in found]

    def settled(self, seconds: float) -> bool:
        count = len(self._unfinished)
        return not count or not ray.wait(self._unfinished, num_returns=count, timeout=seconds, fetch_local=False)[1]

    def _end_processes(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)
        if self._placement is not None:
            remove_placement_group(self._placement)

    def close(self) -> None:
        self._end_processes()
        if self._own_ray is not None:
            ray.shutdown()
            self._own_ray.close()

    def _get(
        self, refs: list[Any], number: int | None = None, sink: Sink | None = None, feed: Feed | None = None
    ) -> list[Any]:
        """Results in order. While waiting, progress and what call `number` reports are passed on, and what `feed` has
        for it. A rank's error is raised as its own type."""
        waiting, found = list(refs), {}
        self._unfinished = list(refs)
        try:
            while waiting:
                seconds = _POLL_SECONDS if feed is None else _FEED_SECONDS
                ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=seconds)
                # Raises now, while the other ranks may wait for the failed one.
                found |= zip(ready, ray.get(ready), strict=True)
                if waiting or sink is not None:
                    # What comes after the end is for the next call.
                    brought = [feed(rank) if feed and waiting else () for rank in range(len(self._actors))]
                    polled = zip(self._actors, brought, strict=True)
                    seen = ray.get([a.poll.remote(number, not waiting, found) for a, found in polled])
                    relay([progress for progress, _ in seen])
                    for item in (item for _, items in seen for item in items):
                        sink(item)  # type: ignore[misc]  # without a sink there are no items
            self._unfinished = []
            return [found[ref] for ref in refs]
        except RayTaskError as error:
            if isinstance(error.cause, UserError | TrainingStopped):
                raise error.cause from None
            if (dead := self._dead_rank(refs)) is not None:  # what the others complain of is that it does not answer
                raise self._died(dead) from error
            raise error from None
        except RayActorError as error:
            dead = self._dead_rank(refs)
            raise (self._died(dead) if dead is not None else WorkerDied(f"a worker process died ({error})")) from error

    def _dead_rank(self, refs: list[Any]) -> int | None:
        """The rank whose process has died, as soon as Ray knows; None if after a while none has."""
        if len(refs) != len(self._actors):
            return None
        deadline = time.monotonic() + _DEATH_SECONDS
        while time.monotonic() < deadline:
            for rank, ref in enumerate(refs):
                if not ray.wait([ref], timeout=0)[0]:
                    continue
                try:
                    ray.get(ref)
                except RayActorError:
                    return rank
                except Exception:
                    pass
            if len(refs) == 1:
                return None
            time.sleep(_POLL_SECONDS)
        return None

    def _died(self, rank: int) -> WorkerDied:
        node = self._nodes[rank] if rank < len(self._nodes) else "its node"
        return WorkerDied(
            f"the process of rank {rank} on node {node} died (the node itself, a kill, or no memory left)"
        )


def _drain(items: deque[Any]) -> list[Any]:
    return [items.popleft() for _ in range(len(items))]


def own_gpu() -> int:
    """The number, among the GPUs that this process sees, of the one that Ray has given it.

    It sees no other one, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set.
    """
    given, seen = str(ray.get_gpu_ids()[0]), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return seen.index(given) if given in seen else int(given)


def _interface(address: str) -> str:
    """The network interface that has this address."""
    interfaces = psutil.net_if_addrs().items()
    return next(name for name, addresses in interfaces if any(one.address == address for one in addresses))


def _start_ray(pool: ResourcePool, ray_init: dict[str, Any]) -> Watchdog:
    settings = {k: v for k, v in ray_init.items() if v is not None}
    least = settings.pop("min_cpus", pool.world_size * pool.num_threads)  # of all pools, where there are several
    if "address" not in settings and not os.environ.get("RAY_ADDRESS"):
        if pool.num_nodes > 1:
            raise UserError(
                f"{pool} needs {pool.num_nodes} nodes, and this machine alone is known: start the same command once on "
                "each node with trainer.node_rank and trainer.master_addr, or name a Ray cluster with RAY_ADDRESS or "
                "ray_kwargs.ray_init.address"
            )
        settings["address"] = "local"  # without it Ray joins whatever cluster has left its name on this machine
        # A laptop may well run more processes than it has cores: the bundles only have to add up.
        settings.setdefault("num_cpus", max(available_cores(), least))
        settings.setdefault("include_dashboard", False)
    else:
        _require_cluster(settings.get("address"))
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        return start_ray(pool.device, **settings)
    except ConnectionError as error:
        raise UserError(f"Ray does not start, or join a cluster, with {settings}: {error}") from None


def _require_cluster(address: str | None) -> None:
    """UserError: nothing answers at the address of the cluster to join, which Ray would try to reach for minutes."""
    key, remedy = "ray_kwargs.ray_init.address", "leave it out"
    if address in (None, "auto") and os.environ.get("RAY_ADDRESS"):
        address, key, remedy = os.environ["RAY_ADDRESS"], "RAY_ADDRESS", "unset it"
    if address in (None, "local"):
        return
    try:
        joined = str(services.canonicalize_bootstrap_address(address)) if address == "auto" else address
        parts = urlsplit(joined if "://" in joined else f"//{joined}")
        if parts.scheme not in ("", "ray") or not parts.hostname or not parts.port:
            raise ValueError("an address is HOST:PORT, ray://HOST:PORT or auto")
        socket.create_connection((parts.hostname, parts.port), timeout=_ANSWER_SECONDS).close()
    except (OSError, ValueError) as error:
        raise UserError(
            f"no Ray cluster answers at {key}={address} ({str(error).partition('. ')[0]}): start it there (ray start "
            f"--head), correct the address, or {remedy} to run on this machine alone"
        ) from None


def _bundle(pool: ResourcePool) -> dict[str, float]:
    """A node's share of the pool, which goes there as a whole, so that no node gets another's processes."""
    each = pool.processes_per_node
    return {"CPU": float(pool.num_threads * each), **({"GPU": float(each)} if pool.device == "cuda" else {})}


def _check_nodes(pool: ResourcePool) -> None:
    """UserError: the cluster has fewer nodes of the size that the pool needs, busy or not."""
    asked, nodes = _bundle(pool), [node for node in ray.nodes() if node["Alive"]]
    large = [node for node in nodes if all(node["Resources"].get(name, 0) >= asked[name] for name in asked)]
    if len(large) < pool.num_nodes:
        needs = " and ".join(f"{count:g} {name}s" for name, count in asked.items())
        has = [
            f"{node['NodeManagerAddress']} with {node['Resources'].get('CPU', 0):g} CPUs and "
            f"{node['Resources'].get('GPU', 0):g} GPUs"
            for node in nodes
        ]
        raise UserError(
            f"{pool} needs {pool.num_nodes} nodes of {needs}, and the Ray cluster has {', '.join(has)}: add "
            "nodes with `ray start --address`, or lower nnodes, n_gpus_per_node or num_threads"
        )
