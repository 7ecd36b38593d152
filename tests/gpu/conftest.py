"""Tests of `make test-gpu`: what only a CUDA device can show. Each says why it is skipped elsewhere."""

import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once in a process, at cuBLAS's first use


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count()
    for item in items:
        needed = max((marker.kwargs.get("devices", 1) for marker in item.iter_markers("gpu")), default=0)
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), this machine has {found}"))


@pytest.fixture
def cuda():
    """The process group of one rank on the first GPU."""
    from valor.engines import distributed

    yield distributed.init_process_group("cuda")
    distributed.leave_process_group()
    torch.cuda.empty_cache()
