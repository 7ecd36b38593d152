"""The process group of one that unsharded tests run in."""

import pytest

from valor.engines import distributed


@pytest.fixture(scope="module")
def alone():
    """A gloo group of this process alone, left at the end of the test file."""
    distributed.init_process_group("cpu")
    yield
    distributed.leave_process_group()
