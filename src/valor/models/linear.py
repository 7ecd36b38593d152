"""Products of bfloat16 numbers on CPUs without instructions for them, which most laptops' are.

torch multiplies such numbers there at a tenth of the speed of float32 ones. Here they are multiplied in float32 and the
result is rounded, which is what those instructions do. Everywhere else all products are torch's own.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from valor.models.internals import bfloat16_in_onednn

_FEWEST_ROWS = 8  # with fewer, a float32 copy of the weight costs more than it saves


@cache
def bfloat16_is_slow() -> bool:
    """Whether this CPU has no instructions for products of bfloat16 numbers."""
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("architecture") == "x86_64":
        return not (capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return not bfloat16_in_onednn()


def computing_dtype(like: Tensor) -> torch.dtype:
    """In which products of numbers as in `like` are fast: its own dtype, or float32."""
    slow = like.dtype is torch.bfloat16 and like.device.type == "cpu" and bfloat16_is_slow()
    return torch.float32 if slow else like.dtype


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, K] · weight [O, K]ᵀ + bias [O], without gradient."""
    return _product(x, weight, bias) if _is_slow(x, weight) else nn.functional.linear(x, weight, bias)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """gradᵀ · x [O, K] of grad [N, O] and x [N, K]."""
    dtype = computing_dtype(x)
    return (grad.to(dtype).t() @ x.to(dtype)).to(x.dtype)


def compute_in_float32(root: nn.Module) -> None:
    """Plain `nn.Linear` layers under `root` multiply bfloat16 numbers in float32, forward and backward."""
    for layer in root.modules():
        if type(layer) is nn.Linear and "forward" not in vars(layer):
            layer.forward = partial(_forward, layer)  # type: ignore[method-assign]


def is_replaced(layer: nn.Module) -> bool:
    """Whether something other than `compute_in_float32` has replaced the layer's forward."""
    forward = vars(layer).get("forward")
    return forward is not None and getattr(forward, "func", None) is not _forward


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    if _is_slow(x, layer.weight) and not torch.is_autocast_enabled("cpu"):
        return _Linear.apply(x, layer.weight, layer.bias)
    return nn.functional.linear(x, layer.weight, layer.bias)


def _is_slow(x: Tensor, weight: Tensor) -> bool:
    several = x.numel() >= _FEWEST_ROWS * x.shape[-1]
    return several and x.dtype is weight.dtype and computing_dtype(x) is not x.dtype


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(x.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), grad = ctx.saved_tensors, grads[0]
        need_x, need_weight, need_bias = ctx.needs_input_grad
        flat, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        d_x = _product(grad, weight.t(), None) if need_x else None
        return d_x, weight_gradient(flat, rows) if need_weight else None, flat.sum(0) if need_bias else None
