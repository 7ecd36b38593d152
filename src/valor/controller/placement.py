"""How many processes, on what device, with how many CPU threads: decided once, before anything is started."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from valor.config import TrainerConfig
from valor.errors import UserError


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
