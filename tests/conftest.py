"""Fixtures every room's tests share."""

import importlib.util
from pathlib import Path

import pytest

TIMED = Path(__file__).parent / "unit" / "rewards"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Graders' tests are marked `alone`; those marked `vllm` are skipped where there is no vLLM (`make vllm-cpu`)."""
    for item in items:
        if TIMED in item.path.parents:
            item.add_marker("alone")
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make vllm-cpu"))


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Reference vectors and real data that developers keep beside the checkout; users do not have them."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip("needs the reference data folder beside the checkout")
    return path
