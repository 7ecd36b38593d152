"""What is used of megatron-core beyond its public names. Checked with 0.19.2; the checkpoints of
tests/integration/test_megatron_engine.py fail where it is gone."""

from typing import Any

from torch import nn


def begin_of(optimizer: Any, parameter: nn.Parameter) -> int:
    """Where in a parameter the part begins that a distributed optimizer updates on this rank."""
    return optimizer._get_model_param_range_map(parameter)["param"].start
