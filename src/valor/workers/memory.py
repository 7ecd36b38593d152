"""How a rank's memory is allocated, and its peak call by call: device memory on CUDA, resident memory elsewhere."""

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from valor.machine import memory

_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_GB = 2.0**30

# Of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_REUSED = 2**30  # bytes of one tensor
_SHORT = 0.5  # of the machine's memory


def use_expandable_segments() -> None:
    """Ask CUDA's allocator for segments that grow, which lengths that vary do not fragment; the user's setting stands.

    Only before CUDA is used for the first time.
    """
    if not os.environ.keys() & {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def keep_freed_memory() -> None:
    """Reuse the memory of freed CPU tensors, where the libc is glibc.

    Otherwise every large tensor takes new pages, which the kernel has to clear; ranks on one machine wait for each
    other in that. The user's `MALLOC_TRIM_THRESHOLD_` or `MALLOC_MMAP_THRESHOLD_` stands.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or os.environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}:
        return
    if mallopt(_MMAP_THRESHOLD, _LARGEST_REUSED):  # refused by glibc before 2.35, whose own rule is then better
        mallopt(_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Give the memory of freed CPU tensors back to the kernel, where the libc is glibc and less than half of the
    machine's memory is available. Where more is, taking it anew would cost time for nothing."""
    total, available = memory()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and available < _SHORT * total:
        trim(0)


def use_deterministic_algorithms() -> None:
    """Ask torch and cuBLAS for algorithms that give the same bits every time. Only before CUDA is used.

    What has no such algorithm warns, and is used.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # a search for bugs, and a pass over new memory


class PeakMemory:
    """The largest memory of each kind of call since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._peaks: dict[str, float] = {}

    @contextmanager
    def __call__(self, call: str) -> Iterator[None]:
        """Measure the block."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):  # Linux has it; elsewhere the peak is that of the process so far
                _RESET.write_text("5")
        try:
            yield
        finally:
            if self._cuda:
                # torch counts the pool of a sleeping vLLM; the driver's count does not, and covers all processes.
                free, total = torch.cuda.mem_get_info(self._device)
                self._note("max_memory_allocated_gb", call, torch.cuda.max_memory_allocated(self._device) / _GB)
                self._note("device_memory_used_gb", call, (total - free) / _GB)
            else:
                self._note("peak_rss_gb", call, peak_rss_gb())

    def _note(self, name: str, call: str, value: float) -> None:
        metric = f"perf/{name}/{call}"
        self._peaks[metric] = max(self._peaks.get(metric, 0.0), value)

    def take(self) -> dict[str, float]:
        """GiB by call. On CUDA `perf/max_memory_allocated_gb/<call>` (the peak) and `perf/device_memory_used_gb/<call>`
        (of the whole device, at the end of the call); elsewhere `perf/peak_rss_gb/<call>`, which includes memory that
        earlier calls have left."""
        peaks, self._peaks = self._peaks, {}
        return peaks


def peak_rss_gb() -> float:
    """Peak resident memory of this process since the last reset (Linux), or ever."""
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / _GB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GB
