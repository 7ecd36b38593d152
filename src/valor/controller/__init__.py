"""Where roles run: in this process or on a Ray cluster, with one calling convention.

group = start_group(pool, specs, controller="local" | "ray")
batch = group["actor"].compute_log_probs(batch)      # split over ranks, run, concatenated in the same row order
"""

from valor.controller.group import Pools, RoleHandle, Roles, WorkerGroup
from valor.controller.placement import Placement, ResourcePool, resolve_placement, resolve_pool
from valor.controller.start import start_group, start_pools

__all__ = [
    "Placement",
    "Pools",
    "ResourcePool",
    "RoleHandle",
    "Roles",
    "WorkerGroup",
    "resolve_placement",
    "resolve_pool",
    "start_group",
    "start_pools",
]
