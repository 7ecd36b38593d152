"""Products with weights, in float32, on CPUs whose BLAS leaves half of their vector units idle.

MKL, with which torch multiplies float32 numbers, has AVX-512 code for Intel's processors alone; oneDNN has it for all,
and is more than twice as fast on AMD's (`benchmarks/step_vs_trl.py --compare off:onednn`). Elsewhere everything here is
torch's own.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 64  # layers use oneDNN for multiples of so many rows: it makes code for each new shape, in a millisecond
_FEWEST_ROWS = 512  # with fewer, the copies that oneDNN's weight gradient needs cost more than it saves
_LARGE = 2**29  # multiplications from which code for a new shape pays at once


@cache
def onednn_is_faster() -> bool:
    name = str(torch.cpu.get_capabilities().get("cpu_name", ""))
    return (
        "AMD" in name and torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, K] · weight [O, K]ᵀ + bias [O], without gradient, of any N."""
    if _by_onednn(x, weight) and x.numel() * len(weight) >= _LARGE:
        return _product(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """gradᵀ · x [O, K] of grad [N, O] and x [N, K], of any N."""
    if _by_onednn(grad, x) and grad.numel() * x.shape[1] >= _LARGE:
        return _gradients(grad, x, with_bias=False)[0]
    return grad.t() @ x


def use_onednn(root: nn.Module) -> None:
    """Let every plain `nn.Linear` under `root` compute by oneDNN, forward and backward."""
    for layer in root.modules():
        if type(layer) is nn.Linear and "forward" not in vars(layer):
            layer.forward = partial(_forward, layer)  # type: ignore[method-assign]


def use_torch(root: nn.Module) -> None:
    """Undo `use_onednn`."""
    for layer in root.modules():
        if "forward" in vars(layer) and not has_own_forward(layer):
            del layer.forward


def has_own_forward(layer: nn.Module) -> bool:
    """Whether somebody else has replaced its forward."""
    forward = vars(layer).get("forward")
    return forward is not None and getattr(forward, "func", None) is not _forward


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    rows = x.numel() // layer.in_features
    if _by_onednn(x, layer.weight) and (rows % ROWS == 0 or rows * layer.weight.numel() >= _LARGE):
        return _Linear.apply(x, layer.weight, layer.bias)
    return nn.functional.linear(x, layer.weight, layer.bias)


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        onednn_is_faster()
        and x.dtype is weight.dtype is torch.float32
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and x.numel() > 0
    )


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
        d_weight = d_bias = None
        if need_weight and len(rows) >= _FEWEST_ROWS:
            d_weight, d_bias = _gradients(flat, rows, with_bias=need_bias)
        elif need_weight:
            d_weight = flat.t() @ rows
        if need_bias and d_bias is None:
            d_bias = flat.sum(0)
        return d_x, d_weight, d_bias


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _gradients(grad: Tensor, x: Tensor, *, with_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Of weight and bias, of grad [N, O] and x [N, K]."""
    of = grad.to_mkldnn(), x.to_mkldnn(), x  # in place of a weight, of which the dtype alone is read
    found = torch.ops.aten.mkldnn_linear_backward_weights(*of, with_bias)
    return found[0], found[1] if with_bias else None
