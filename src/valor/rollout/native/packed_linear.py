"""Linear layers in the CPU library's own weight layout while a generation lasts.

A decode step multiplies few rows by every weight of the model, so the time goes into reading weights. oneDNN reads
its blocked layout fastest, and for float32 it beats the BLAS behind `nn.Linear` about twofold on some processors at any
number of rows (measurements: benchmarks/rollout_speed.py, option --no-pack). Packing costs one pass over the
weights and a second copy of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from valor.models.lora import adapted_layers, merged_weight

# Rows for which the layout is chosen; other row counts work as well with it.
TYPICAL_ROWS = 64


@contextmanager
def packed_linears(root: nn.Module) -> Iterator[None]:
    """Every CPU `nn.Linear` under `root` computes with a packed copy of its weight; undone at exit.

    The copies are those of the weights at entry: no training step may happen inside. Modules on other devices, of
    other dtypes or with a forward of their own stay as they are. A float32 layer with an adapter is packed as their
    sum; in bfloat16, where the sum would be rounded, its parts are packed one by one.
    """
    adapted = {id(layer): layer for layer in adapted_layers(root).values() if _mergeable(layer)}
    inside = {id(part) for layer in adapted.values() for part in layer.modules() if part is not layer}
    packed = [m for m in root.modules() if id(m) in adapted or (id(m) not in inside and _packable(m))]
    for module in packed:
        linear: Any = adapted[id(module)].base_layer if id(module) in adapted else module
        weight = merged_weight(module) if id(module) in adapted else linear.weight
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TYPICAL_ROWS)
        bias = None if linear.bias is None else linear.bias.detach()
        module.forward = partial(_forward, blocked, bias)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in packed:
            del module.forward


def _mergeable(layer: Any) -> bool:
    return _packable(layer.base_layer) and layer.base_layer.weight.dtype is torch.float32


def _packable(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in module.__dict__
        and has_packed_layout(module.weight)
    )


def has_packed_layout(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
    )


def _forward(weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
