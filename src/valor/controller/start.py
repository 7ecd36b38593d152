"""Start worker groups on the controller that was asked for: in this process, or on a Ray cluster."""

from functools import partial
from typing import Any

from valor.controller.group import Arguments, Feed, Pools, Sink, WorkerGroup
from valor.controller.placement import Placement, ResourcePool
from valor.workers.host import RoleSpec, WorkerHost


class LocalGroup(WorkerGroup):
    """All roles in this very process: no copies, no serialisation, a debugger's breakpoints just work."""

    def __init__(self, pool: ResourcePool, specs: dict[str, RoleSpec]) -> None:
        super().__init__(pool, specs)
        assert pool.world_size == 1
        self._host = WorkerHost(0, 1, pool.device, pool.num_threads, deterministic=pool.deterministic)
        self._host.connect()
        try:
            self._host.build(specs)
        except BaseException:
            self._host.close()
            raise

    def run(
        self, role: str, method: str, calls: list[Arguments], sink: Sink | None = None, feed: Feed | None = None
    ) -> list[Any]:
        ((args, kwargs),) = calls
        channels: dict[str, Any] = {} if sink is None else {"sink": sink}
        channels |= {} if feed is None else {"feed": partial(feed, 0)}
        return [self._host.call(role, method, *args, **kwargs, **channels)]

    def close(self) -> None:
        self._host.close()


def start_group(
    pool: ResourcePool, specs: dict[str, RoleSpec], *, controller: str, ray_init: dict[str, Any]
) -> WorkerGroup:
    """Bring up `specs` on `pool`. Ray is imported only when it is used: it takes half a second and 300 MB."""
    if controller == "local":
        return LocalGroup(pool, specs)
    from valor.controller.ray_group import RayGroup

    return RayGroup(pool, specs, ray_init)


def start_pools(placement: Placement, specs: dict[str, RoleSpec], ray_init: dict[str, Any] | None = None) -> Pools:
    """Bring up each role of `specs` in its pool; roles of one pool are built in the given order."""
    groups: dict[str, WorkerGroup] = {}
    settings = dict(ray_init or {})
    if settings.get("address") is None and settings.get("num_cpus") is None:
        settings["min_cpus"] = sum(pool.world_size * pool.num_threads for pool in placement.pools.values())
    try:
        for name, pool in placement.pools.items():
            roles = {role: spec for role, spec in specs.items() if placement.pool_of(role) == name}
            groups[name] = start_group(pool, roles, controller=placement.controller, ray_init=settings)
    except BaseException:
        Pools(placement, groups).close()
        raise
    return Pools(placement, groups)
