"""Labels do not depend on the machine: graders in the tests' own process have time enough on the slowest one."""

from collections.abc import Iterator

import pytest

from valor.rewards import code, mathematics, reasoning_gym


@pytest.fixture(autouse=True, scope="module")
def patient_graders() -> Iterator[None]:
    """Long limits. Tests of a limit itself set a short one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mathematics, "SECONDS", 30.0)
        patch.setattr(reasoning_gym, "_SECONDS", 30.0)
        patch.setattr(code, "_seconds", 60.0)
        yield
