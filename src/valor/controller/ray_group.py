"""Roles as Ray actors: one process a rank, placed by a placement group. The only file that imports ray."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from valor.controller.group import Call, WorkerGroup
from valor.controller.placement import ResourcePool, available_cores
from valor.errors import UserError
from valor.tracking.progress import Latest, Progress, add_listener, relay
from valor.workers.host import RoleSpec, WorkerHost

_POLL_SECONDS = 0.5
_PLACEMENT_SECONDS = 120.0


class _RayHost:
    """A WorkerHost in a Ray process; progress is asked for on a second thread while a call runs."""

    def __init__(self, rank: int, pool: ResourcePool) -> None:
        self._progress = Latest()
        add_listener(self._progress)
        self._host = WorkerHost(rank, pool.world_size, pool.device, pool.num_threads)

    def address(self) -> tuple[str, int]:
        """Where rank 0 will listen: this node's address and a free port."""
        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), s.getsockname()[1]

    def connect(self, address: str, port: int) -> None:
        self._host.connect(address, port)

    def build(self, specs: dict[str, RoleSpec]) -> None:
        self._host.build(specs)

    def call(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._progress.reset()
        return self._host.call(role, method, *args, **kwargs)

    def close(self) -> None:
        self._host.close()

    @ray.method(concurrency_group="watch")
    def progress(self) -> Progress | None:
        return self._progress.get()


class RayGroup(WorkerGroup):
    """One Ray actor for each rank of the pool."""

    def __init__(self, pool: ResourcePool, specs: dict[str, RoleSpec], ray_init: dict[str, Any]) -> None:
        super().__init__(pool, specs)
        self._owns_ray = not ray.is_initialized()
        self._actors: list[Any] = []
        self._placement: PlacementGroup | None = None
        if self._owns_ray:
            _start_ray(pool, ray_init)
        try:
            self._place()
            address, port = self._get([self._actors[0].address.remote()])[0]
            self._get([a.connect.remote(address, port) for a in self._actors])
            self._get([a.build.remote(specs) for a in self._actors])
        except BaseException:  # a model that cannot be loaded, Ctrl-C: no process and no reservation stays behind
            self.close()
            raise

    def _place(self) -> None:
        """Reserve the pool's resources and start a process on each bundle. UserError when they are not to be had."""
        pool, cpus = self.pool, self.pool.num_threads
        bundle = {"CPU": float(cpus), **({"GPU": 1.0} if pool.device == "cuda" else {})}
        self._placement = placement_group([bundle] * pool.world_size, strategy="PACK")
        if not self._placement.wait(_PLACEMENT_SECONDS):
            raise UserError(
                f"Ray could not place {pool} within {_PLACEMENT_SECONDS:.0f} s: it has {ray.available_resources()}"
            )
        actor_class: Any = ray.remote(concurrency_groups={"watch": 1})(_RayHost)  # type: ignore[call-overload]
        self._actors = [
            actor_class.options(
                num_cpus=cpus,
                num_gpus=1 if pool.device == "cuda" else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=rank
                ),
            ).remote(rank, pool)
            for rank in range(pool.world_size)
        ]

    def run(self, role: str, method: str, calls: list[Call]) -> list[Any]:
        # The same arguments for every rank are stored once and shared.
        if len(calls) > 1 and all(c is calls[0] for c in calls):
            args, kwargs = calls[0]
            refs = [ray.put(args), ray.put(kwargs)]
            return self._get([a.call.remote(role, method, *refs) for a in self._actors])
        return self._get([a.call.remote(role, method, *c) for a, c in zip(self._actors, calls, strict=True)])

    def close(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)
        if self._placement is not None:
            remove_placement_group(self._placement)
        if self._owns_ray:
            ray.shutdown()

    def _get(self, refs: list[Any]) -> list[Any]:
        """Results in order; progress is passed on while waiting; a rank's error is raised as its own type."""
        waiting = list(refs)
        try:
            while waiting:
                ready, waiting = ray.wait(waiting, timeout=_POLL_SECONDS)
                for ref in ready:
                    ray.get(ref)  # raises at once, while the other ranks may wait for the failed one
                if waiting:
                    relay(ray.get([a.progress.remote() for a in self._actors]))
            return ray.get(refs)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, UserError) else error from None
        except RayActorError as error:
            raise RuntimeError(f"a worker process died: {error}") from error


def _start_ray(pool: ResourcePool, ray_init: dict[str, Any]) -> None:
    settings = {k: v for k, v in ray_init.items() if v is not None}
    least = settings.pop("min_cpus", pool.world_size * pool.num_threads)  # of all pools, where there are several
    if "address" not in settings:
        # A laptop may well run more processes than it has cores: the bundles only have to add up.
        settings.setdefault("num_cpus", max(available_cores(), least))
        settings.setdefault("include_dashboard", False)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **settings)
    except ConnectionError as error:
        raise UserError(f"no Ray cluster at ray_kwargs.ray_init.address={settings.get('address')}: {error}") from None
