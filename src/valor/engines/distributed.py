"""The process group of all runs of a process: gloo on CPUs, nccl on GPUs, no network for a group of one."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from valor.errors import UserError

_TIMEOUT = timedelta(minutes=30)
_members = 0  # who have joined this process's group and not left it: two runs, or the user's own script and a run


def select_device(device: str, gpu: int = 0) -> torch.device:
    """The torch device for `auto`, `cpu` or `cuda`; `gpu` is a number among the GPUs that this process sees."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UserError("trainer.device=cuda but no CUDA GPU is visible: use trainer.device=cpu")
    if device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", gpu)


def init_process_group(
    device: str = "auto",
    *,
    rank: int = 0,
    world_size: int = 1,
    address: str | None = None,
    port: int | None = None,
    gpu: int = 0,
) -> torch.device:
    """Join the group of `world_size` ranks whose rank 0 listens at address:port; returns this rank's device.

    A group of one lives in this process alone. Joining the same group again only counts; another one is a ValueError
    until all have left by `leave_process_group`.
    """
    global _members
    chosen = select_device(device, gpu)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if dist.is_initialized():
        joined = (dist.get_rank(), dist.get_world_size())
        if joined != (rank, world_size):
            raise ValueError(f"this process is rank {joined[0]} of {joined[1]}; it cannot be {rank} of {world_size}")
        _members = max(_members, 1) + 1  # a group that nobody here has made is the user's
        return chosen
    if world_size == 1:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    else:
        if address is None or port is None:
            raise ValueError("a group of several ranks needs the address and port of its rank 0")
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            address, port, world_size, is_master=rank == 0, timeout=_TIMEOUT
        )
    backend = "gloo" if chosen.type == "cpu" else "cpu:gloo,cuda:nccl"
    hook = sys.excepthook
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    if world_size == 1:
        sys.excepthook = hook  # torch's would mark the lines of all tracebacks to come, once for each group
    _members = 1
    return chosen


def leave_process_group() -> None:
    """Leave the group, which ends with its last member."""
    global _members
    _members = max(_members - 1, 0)
    if _members == 0 and dist.is_initialized():
        dist.destroy_process_group()


def max_over_ranks(value: int) -> int:
    """The largest of one non-negative integer per rank."""
    if dist.get_world_size() == 1:
        return value
    box = torch.tensor([value], dtype=torch.long)  # gloo carries CPU tensors on every kind of machine
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box)
