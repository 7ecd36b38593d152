"""Cores and memory of this machine that this process may use: a container or a batch job has limits of its own."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

_MOUNT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# By version of Linux's control groups. Of the cores' time: the microseconds per period, and the period.
_TIME = {"": ["cpu.max"], "cpu": ["cpu.cfs_quota_us", "cpu.cfs_period_us"]}
# Of memory: the limit, what is used of it, and in memory.stat the files' pages among that
# which the kernel takes back first.
_MEMORY = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class Memory(NamedTuple):
    """Bytes."""

    total: int
    available: int


def available_cores() -> int:
    """Cores that this process may use, or that are filled by the share of time that its container or job has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for controller, files in _TIME.items():
        for group in _groups(controller):
            with suppress(OSError, ValueError):  # no such group, or no limit ("max", and -1)
                share, period = map(int, " ".join((group / file).read_text() for file in files).split())
                cores = min(cores, math.ceil(share / period)) if share > 0 else cores
    return cores


def memory() -> Memory:
    """The memory of the machine, or of the container or job where that has less."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for controller, (limit_file, used_file, reclaimable) in _MEMORY.items():
        for group in _groups(controller):
            with suppress(OSError, ValueError):  # no such group, or no limit ("max")
                limit = int((group / limit_file).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / used_file).read_text()) - int(stat.get(reclaimable, 0))
                total, available = min(total, limit), min(available, max(limit - used, 0))
    return Memory(total, available)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control group and those above it; in a container the uppermost is its own."""
    with suppress(OSError):
        for line in _MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                folder = Path(path.lstrip("/"))
                yield from (_MOUNT / controller / part for part in (folder, *folder.parents))
