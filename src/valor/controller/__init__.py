"""Where roles run: in this process or on a Ray cluster, with one calling convention.

group = start_group(pool, specs, controller="local" | "ray")
batch = group["actor"].compute_log_probs(batch)      # split over ranks, run, concatenated in the same row order
"""

from valor.controller.group import RoleHandle, WorkerGroup
from valor.controller.placement import ResourcePool, resolve_pool
from valor.controller.start import start_group

__all__ = ["ResourcePool", "RoleHandle", "WorkerGroup", "resolve_pool", "start_group"]
