"""Products with weights on CPUs that are slow at them the way torch computes them.

MKL, with which torch multiplies float32 numbers, has AVX-512 code for Intel's processors alone; oneDNN has it for all,
and is more than twice as fast on AMD's (`benchmarks/step_vs_trl.py --compare off:onednn`).

Processors without instructions for bfloat16, most laptops' among them, multiply such numbers at a tenth of the speed of
float32 ones. There a product of bfloat16 numbers is computed in float32 and its result rounded, which is what those
instructions do. Elsewhere everything here is torch's own.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 64  # layers use oneDNN for multiples of so many rows: it makes code for each new shape, in a millisecond
# With fewer, rows or numbers of a weight, the copies that oneDNN's weight gradient needs cost more than it saves.
_FEWEST_ROWS, _LEAST_WEIGHT = 512, 2**18
_FEWEST_WIDE_ROWS = 8  # with fewer, making float32 weights costs more than it saves
_LARGE = 2**29  # multiplications from which code for a new shape pays at once


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 numbers faster on this CPU than torch's own BLAS."""
    name = str(torch.cpu.get_capabilities().get("cpu_name", ""))
    return (
        "AMD" in name and torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
    )


@cache
def bfloat16_is_slow() -> bool:
    """Whether this CPU has no instructions for products of bfloat16 numbers."""
    found = torch.cpu.get_capabilities()
    if found.get("architecture") == "x86_64":
        return not (found.get("avx512_bf16") or found.get("amx_bf16"))
    return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def torch_is_slow(dtype: torch.dtype) -> bool:
    """Whether there is a faster way than torch's to multiply such numbers on this CPU."""
    remedies = {torch.float32: onednn_is_faster, torch.bfloat16: bfloat16_is_slow}
    return dtype in remedies and remedies[dtype]()


def computing_dtype(like: Tensor) -> torch.dtype:
    """In which products of numbers as in `like` are fast: its own dtype, or float32."""
    slow = like.dtype is torch.bfloat16 and like.device.type == "cpu" and bfloat16_is_slow()
    return torch.float32 if slow else like.dtype


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, K] · weight [O, K]ᵀ + bias [O], without gradient, of any N."""
    if _is_slow(x, weight) and (len(x) >= _FEWEST_WIDE_ROWS if _is_wide(x) else x.numel() * len(weight) >= _LARGE):
        return _product(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """gradᵀ · x [O, K] of grad [N, O] and x [N, K], of any N."""
    if _is_slow(grad, x) and (_is_wide(x) or grad.numel() * x.shape[1] >= _LARGE):
        return _gradients(grad, x, with_bias=False)[0]
    return grad.t() @ x


def speed_up(root: nn.Module) -> None:
    """Let every plain `nn.Linear` under `root` compute the fast way, forward and backward."""
    for layer in root.modules():
        if type(layer) is nn.Linear and "forward" not in vars(layer):
            layer.forward = partial(_forward, layer)  # type: ignore[method-assign]


def use_torch(root: nn.Module) -> None:
    """Undo `speed_up`."""
    for layer in root.modules():
        if "forward" in vars(layer) and not has_own_forward(layer):
            del layer.forward


def has_own_forward(layer: nn.Module) -> bool:
    """Whether somebody else has replaced its forward."""
    forward = vars(layer).get("forward")
    return forward is not None and getattr(forward, "func", None) is not _forward


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    rows = x.numel() // layer.in_features
    if _is_slow(x, layer.weight):
        many = rows >= _FEWEST_WIDE_ROWS if _is_wide(x) else rows % ROWS == 0 or rows * layer.weight.numel() >= _LARGE
        if many:
            return _Linear.apply(x, layer.weight, layer.bias)
    return nn.functional.linear(x, layer.weight, layer.bias)


def _is_slow(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's way is not the fastest, leaving aside the number of rows."""
    return (
        x.device.type == "cpu"
        and x.dtype is weight.dtype
        and torch_is_slow(x.dtype)
        and not torch.is_autocast_enabled("cpu")
        and x.numel() > 0
    )


def _is_wide(x: Tensor) -> bool:
    """Whether products of such numbers are computed in wider ones."""
    return x.dtype is torch.bfloat16


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
        gains = len(rows) >= _FEWEST_ROWS and weight.numel() >= _LEAST_WEIGHT
        if need_weight and (_is_wide(x) or gains):
            d_weight, d_bias = _gradients(flat, rows, with_bias=need_bias)
        elif need_weight:
            d_weight = flat.t() @ rows
        if need_bias and d_bias is None:
            d_bias = flat.sum(0)
        return d_x, d_weight, d_bias


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _is_wide(x):
        found = nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return found.to(x.dtype)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _gradients(grad: Tensor, x: Tensor, *, with_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Of weight and bias, of grad [N, O] and x [N, K]."""
    if _is_wide(x):
        return (grad.float().t() @ x.float()).to(x.dtype), grad.sum(0) if with_bias else None
    of = grad.to_mkldnn(), x.to_mkldnn(), x  # in place of a weight, of which the dtype alone is read
    found = torch.ops.aten.mkldnn_linear_backward_weights(*of, with_bias)
    return found[0], found[1] if with_bias else None
