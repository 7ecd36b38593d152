"""Start worker groups on the controller that was asked for."""

from __future__ import annotations

from typing import Any

from valor.controller.group import Pools, WorkerGroup
from valor.controller.local import LocalGroup
from valor.controller.placement import Placement, ResourcePool
from valor.workers.host import RoleSpec


def start_group(
    pool: ResourcePool, specs: dict[str, RoleSpec], *, controller: str, ray_init: dict[str, Any] | None = None
) -> WorkerGroup:
    """Bring up `specs` on `pool`. Ray is imported only when it is used: it takes half a second and 300 MB."""
    if controller == "local":
        return LocalGroup(pool, specs)
    from valor.controller.ray_group import RayGroup

    return RayGroup(pool, specs, ray_init or {})


def start_pools(placement: Placement, specs: dict[str, RoleSpec], ray_init: dict[str, Any] | None = None) -> Pools:
    """Bring up each role of `specs` in its pool; roles of one pool are built in the given order."""
    groups: dict[str, WorkerGroup] = {}
    settings = dict(ray_init or {})
    if settings.get("address") is None and settings.get("num_cpus") is None:
        settings["min_cpus"] = sum(pool.world_size * pool.num_threads for pool in placement.pools.values())
    try:
        for name, pool in placement.pools.items():
            own = {role: spec for role, spec in specs.items() if placement.pool_of(role) == name}
            groups[name] = start_group(pool, own, controller=placement.controller, ray_init=settings)
    except BaseException:
        Pools(placement, groups).close()
        raise
    return Pools(placement, groups)
