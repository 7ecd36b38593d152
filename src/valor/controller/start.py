"""Start a worker group on the controller that was asked for."""

from __future__ import annotations

from typing import Any

from valor.controller.group import WorkerGroup
from valor.controller.local import LocalGroup
from valor.controller.placement import ResourcePool
from valor.workers.host import RoleSpec


def start_group(
    pool: ResourcePool, specs: dict[str, RoleSpec], *, controller: str, ray_init: dict[str, Any] | None = None
) -> WorkerGroup:
    """Bring up `specs` on `pool`. Ray is imported only when it is used: it takes half a second and 300 MB."""
    if controller == "local":
        return LocalGroup(pool, specs)
    from valor.controller.ray_group import RayGroup

    return RayGroup(pool, specs, ray_init or {})
