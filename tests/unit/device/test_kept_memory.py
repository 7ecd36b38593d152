"""A process on CPUs reuses the memory of large tensors that are gone, unless the user has set glibc's thresholds."""

import os
import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource, sys, torch
from valor.workers.memory import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def faults():
    for smaller in range(4):  # what is aligned needs a little more room than it takes
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**26 - 2**20 * smaller)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""
_HERE = "print(faults())"
_UNDER_RAY = """
import ray
from valor.controller.placement import ResourcePool
from valor.controller.cluster import start_or_join

class Host:
    def __init__(self):
        keep_freed_memory()

    def call(self):
        return faults()

watchdog = start_or_join(ResourcePool(1, 1, "cpu", 1), {"min_cpus": 1})
print(ray.get(ray.remote(concurrency_groups={"poll": 1})(Host).remote().call.remote()))
ray.shutdown()
watchdog.close()
"""


def _faults(how: str, where: str = _HERE, **environment: str) -> int:
    """Pages of new memory that a tensor of a quarter of a GiB takes where three larger ones were before."""
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS + where, how],
        env={name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


keeps = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 35),
    reason="glibc of 2.35 or later keeps tensors of any size",
)


@keeps
def test_a_large_tensor_takes_the_place_of_one_that_is_gone():
    new = _faults("as it is")
    assert new >= 2**27 / 2**21  # at least one for each huge page
    assert _faults("kept") < new / 8
    assert _faults("kept", MALLOC_TRIM_THRESHOLD_="131072") > new / 2


_LEFT = """
import sys, types
import psutil, torch
from valor.workers import memory

memory.keep_freed_memory()
between = [torch.ones(2**22) for _ in range(16)][::2]  # the heap cannot shrink from its end
psutil.virtual_memory = lambda: types.SimpleNamespace(available=float(sys.argv[1]), total=1.0)
before = psutil.Process().memory_info().rss
memory.return_freed_memory()
print((before - psutil.Process().memory_info().rss) // 2**20)
"""


@keeps
def test_freed_memory_goes_back_where_less_than_half_of_the_machine_s_is_available():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    returned = [
        int(subprocess.check_output([sys.executable, "-c", _LEFT, available], env=environment, text=True))
        for available in ("0.51", "0.49")
    ]
    assert returned[0] < 8 and returned[1] > 7 * 16 - 8, returned  # MiB, of tensors of 16


@keeps
@pytest.mark.slow
@pytest.mark.long
def test_under_ray_whose_calls_run_in_a_thread():
    assert _faults("kept", _UNDER_RAY) < 2**27 / 2**21
