"""Fixtures every room's tests share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Reference vectors and real data that developers keep beside the checkout; users do not have them."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip("needs the reference data folder beside the checkout")
    return path
