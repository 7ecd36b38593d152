"""What sequence parallelism refuses; its numbers are compared in tests/integration/test_world_sizes.py."""

import pytest
from tiny_engine import CPU, tiny_policy

from valor.config.engine import FSDPConfig
from valor.engines.fsdp.engine import FSDPEngine
from valor.errors import UserError
from valor.models.policy import PolicyModel

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize(
    ("size", "packed", "line"),
    [
        (2, False, "ulysses_sequence_parallel_size=2 shares packed rows out"),
        (3, True, "ulysses_sequence_parallel_size=3 does not divide the 2 attention heads"),
        (2, True, "ulysses_sequence_parallel_size=2 does not divide the 1 processes"),
    ],
)
def test_one_line_says_what_does_not_fit(size, packed, line):
    policy = PolicyModel(tiny_policy().hf, packed=packed)
    with pytest.raises(UserError, match=line):
        FSDPEngine(policy, fsdp=FSDPConfig(dtype="float32"), optim=None, device=CPU, sequence_parallel=size)
