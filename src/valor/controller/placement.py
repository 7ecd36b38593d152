"""How many processes, on what device, with how many CPU threads: decided once, before anything is started."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from valor.config import PPOConfig, TrainerConfig
from valor.errors import UserError

MAIN = "main"


@dataclass(frozen=True)
class ResourcePool:
    """Processes that host roles: `processes_per_node` on each of `num_nodes` nodes, one GPU each when on `cuda`."""

    num_nodes: int
    processes_per_node: int
    device: str  # "cpu" or "cuda"
    num_threads: int  # CPU threads of each process

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.processes_per_node

    def __str__(self) -> str:
        what = "GPU" if self.device == "cuda" else f"CPU process, {self.num_threads} threads each"
        return f"{self.world_size} x {what} on {self.num_nodes} node(s)"


@dataclass(frozen=True)
class Placement:
    """Where a run's roles live: `pools` by name, `home` of the roles that are not in the pool MAIN."""

    controller: str  # "local" or "ray"
    pools: dict[str, ResourcePool]
    home: dict[str, str]

    @property
    def world_size(self) -> int:
        """Processes of all pools."""
        return sum(pool.world_size for pool in self.pools.values())

    def pool_of(self, role: str) -> str:
        """Name of the role's pool; the members of an ensemble live together."""
        return self.home.get("critic" if role.startswith("critic_") else role, MAIN)

    def table(self, roles: Iterable[str]) -> str:
        """Who shares what, a line a pool."""
        roles = list(roles)
        width = max(map(len, self.pools))
        return "\n".join(
            f"{name:<{width}}  {pool}: {', '.join(role for role in roles if self.pool_of(role) == name)}"
            for name, pool in self.pools.items()
        )


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve_pool(trainer: TrainerConfig) -> tuple[ResourcePool, str]:
    """The pool and the controller ("local" or "ray") that `trainer.*` asks for on this machine.

    Raises UserError when GPUs are asked for that are not there, or one process is asked to be several.
    """
    gpus = torch.cuda.device_count()
    device = trainer.device if trainer.device != "auto" else ("cuda" if gpus else "cpu")
    asked = trainer.n_gpus_per_node
    remote = trainer.nnodes > 1 or trainer.controller == "ray"
    if device == "cuda" and not remote and gpus < (asked or 1):
        raise UserError(
            f"trainer.n_gpus_per_node={asked or 1} asked, {gpus} GPUs found: set trainer.n_gpus_per_node to what is "
            "there, or trainer.device=cpu"
        )
    if device == "cpu" and trainer.device == "auto" and (asked or 1) > 1:
        raise UserError(
            f"trainer.n_gpus_per_node={asked} asked, and this machine has no GPU: set trainer.n_gpus_per_node=1 to run "
            "on the CPU, or trainer.device=cpu to run that many CPU processes"
        )
    processes = asked or (gpus if device == "cuda" else 1)
    threads = trainer.num_threads or max(1, available_cores() // processes)
    pool = ResourcePool(trainer.nnodes, processes, device, threads)
    controller = trainer.controller
    if controller == "auto":
        controller = "local" if pool.world_size == 1 else "ray"
    if controller == "local" and pool.world_size > 1:
        raise UserError(
            f"trainer.controller=local runs one process, {pool.world_size} asked: use trainer.controller=ray"
        )
    return pool, controller


def resolve_placement(config: PPOConfig) -> Placement:
    """The run's pools: that of `trainer.*`, and those of `resource_pools`, whose processes are on the same device."""
    main, controller = resolve_pool(config.trainer)
    pools, home = {MAIN: main}, {}
    for name, asked in config.pools.items():
        threads = asked.num_threads or config.trainer.num_threads or main.num_threads
        pools[name] = ResourcePool(asked.nnodes, asked.n_gpus_per_node, main.device, threads)
        home |= dict.fromkeys(asked.roles, name)
    apart = bool(config.pools) or config.trainer.node_rank is not None
    return Placement("ray" if apart else controller, pools, home)
