"""What a decode step does on CPUs beside products with weights, in compiled loops over the rows: norms, and attention
of one new token per row (rotary embedding, new column, softmax of scores, sums of values).

As tensor operations attention is some thirty small ones a layer, over rows padded to the longest of them; here each row
is read to its own length, once, by whichever of torch's threads is free. numba compiles the loops at first use and
keeps the result on disk.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import carray, types
from torch import Tensor

from valor.rollout.native.kv_cache import SIMD_WIDTH, SlotCache
from valor.rollout.native.loops import attend, normalize, work_space
from valor.rollout.native.vectors import compiled, memory, numbers, take_next

# Fields of what the loops are given: `next` is the first row that no thread has taken, `row_columns` and
# `prompt_columns` are columns in memory; the others are sizes, then addresses of arrays, whose shapes the loops tell.
SIZES = ("next", "rows", "heads", "kv_heads", "size", "width", "row_columns", "prompt_columns")
ABOUT = ("cos", "sin", "lengths", "prompts", "starts")
MEMORY = ("keys", "values", "prompt_keys", "prompt_values")


def kind(integers: tuple[str, ...], floats: tuple[str, ...]) -> np.dtype:
    return np.dtype([(name, np.int64) for name in integers] + [(name, np.float64) for name in floats])


STEP = kind((*SIZES, *ABOUT, *MEMORY, "qkv", "out"), ("scaling",))
NORM = kind(("next", "rows", "size", "x", "weight", "out"), ("eps",))
_LEAST_SHARED = 2**16  # elements of a norm: with fewer, a second thread costs more than it gains
MANY = 2**60  # length of arrays whose length nobody asks for


@compiled
def about_rows(step: Any) -> Any:
    """cos, sin, lengths, prompts, starts of a STEP or WHOLE."""
    cos, sin = carray(memory(step.cos), MANY, np.float32), carray(memory(step.sin), MANY, np.float32)
    lengths, prompts = carray(memory(step.lengths), MANY, np.int64), carray(memory(step.prompts), MANY, np.int64)
    return cos, sin, lengths, prompts, carray(memory(step.starts), MANY, np.int64)


def attend_rows(task: Any) -> None:
    """out [B, heads, D]: attention of each row's new token, whose key and value become the row's next column.

    task: address of a STEP, typed as a pointer to numbers of the dtype. In that dtype: qkv [B, heads + 2 kv heads, D];
    keys [_, kv heads, C / BLOCK, D, BLOCK] and values [_, kv heads, C, D] of the rows, of which lengths [B] columns are
    in use; prompt_keys and prompt_values likewise, of which row b reads starts[b] columns of prompts[b]. In float32:
    cos, sin [B, D].
    """
    step = carray(memory(task), 1, STEP)[0]
    qkv, out = carray(numbers(task, step.qkv), MANY), carray(numbers(task, step.out), MANY)
    keys, values = carray(numbers(task, step.keys), MANY), carray(numbers(task, step.values), MANY)
    prompt_keys = carray(numbers(task, step.prompt_keys), MANY)
    prompt_values = carray(numbers(task, step.prompt_values), MANY)
    buffers, about, space = (keys, values, prompt_keys, prompt_values), about_rows(step), work_space(step)
    each, row = (step.heads + 2 * step.kv_heads) * step.size, take_next(task)
    while row < step.rows:
        attend(step, row, buffers, about, qkv, row * each, out, row * step.heads * step.size, space)
        row = take_next(task)


def scale_rows(task: Any) -> None:
    """out [N, D]: the rows x [N, D] over their root mean squares, times weight [D]. task: address of a NORM."""
    norm = carray(memory(task), 1, NORM)[0]
    x, out = carray(numbers(task, norm.x), MANY), carray(numbers(task, norm.out), MANY)
    weight, row = carray(numbers(task, norm.weight), MANY), take_next(task)
    while row < norm.rows:
        normalize(x, row * norm.size, norm.size, weight, 0, norm.eps, out, row * norm.size)
        row = take_next(task)


_NUMBA_TYPES: dict[torch.dtype, Any] = {torch.float32: types.float32, torch.bfloat16: types.uint16}


@cache
def _address(loop: Callable[[Any], None], dtype: torch.dtype) -> int:
    """Of a loop over numbers of this dtype, as a C function."""
    return compiled(loop, types.void(types.CPointer(_NUMBA_TYPES[dtype]))).address


@cache
def _in_threads() -> Any:
    """Runs a C function in all of torch's threads, which other threads would keep from their cores; None where torch
    has them from a library without this function."""
    try:
        run = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return run


class Task:
    """Arguments of a loop: numbers, and addresses of tensors, which are kept alive where they are given here."""

    def __init__(self, kind: np.dtype, **fields: float | Tensor) -> None:
        self._fields, self._alive = np.zeros((), kind), fields
        self.set(**fields)

    def set(self, **fields: float | Tensor) -> None:
        for name, value in fields.items():
            self._fields[name] = value.data_ptr() if isinstance(value, Tensor) else value

    def run(self, loop: Callable[[Any], None], dtype: torch.dtype, threads: int) -> None:
        self._fields["next"], in_threads, address = 0, _in_threads(), _address(loop, dtype)
        if in_threads is not None and threads > 1:
            in_threads(address, self._fields.ctypes.data, threads, 0)
        else:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(self._fields.ctypes.data)


class CompiledNorm:
    """Root mean square norm over the last dimension, in the dtype of `weight`."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._dtype, self._task = weight.dtype, Task(NORM, size=len(weight), weight=weight.contiguous(), eps=eps)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self._dtype).contiguous()
        out, threads = torch.empty_like(x), torch.get_num_threads() if x.numel() >= _LEAST_SHARED else 1
        self._task.set(rows=x.numel() // x.shape[-1], x=x, out=out)
        self._task.run(scale_rows, self._dtype, threads)
        return out


def row_fields(cache: SlotCache, cos: Tensor, sin: Tensor) -> dict[str, Any]:
    """Fields of a STEP or WHOLE that describe the rows."""
    width = cache.prompt_width + -cache.prompt_width % SIMD_WIDTH + cache.width + -cache.width % SIMD_WIDTH
    prompts = cache.prompts if cache.shared else cache.own
    sizes = {"rows": len(cos), "width": width, "row_columns": cache.own.columns, "prompt_columns": prompts.columns}
    rows = {"lengths": cache.write_at, "prompts": cache.prompt_of, "starts": cache.starts}
    return {**sizes, **rows, "cos": cos.float(), "sin": sin.float()}


def buffers_of(cache: SlotCache, layer: int, like: Tensor) -> tuple[Tensor, ...]:
    """Keys and values of rows and of prompts; `like` [_, kv heads, _, D]."""
    rows = cache.own.layer(layer, (like, like))
    return *rows, *cache.prompts.layers.get(layer, rows)


class CompiledAttention:
    """Attention of one decode step of all layers; cos, sin [B, 1, D] of the new tokens."""

    def __init__(self, cache: SlotCache, cos: Tensor, sin: Tensor, heads: int, scaling: float) -> None:
        self._cache, self._heads = cache, heads
        self._task = Task(STEP, heads=heads, scaling=scaling, **row_fields(cache, cos, sin))

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """[B, heads * D] from qkv [B, heads + 2 kv heads, D], which is contiguous."""
        kv_heads, size = (qkv.shape[1] - self._heads) // 2, qkv.shape[2]
        buffers = dict(zip(MEMORY, buffers_of(self._cache, layer, qkv[:, :kv_heads, None]), strict=True))
        out = qkv.new_empty(len(qkv), self._heads * size)
        self._task.set(kv_heads=kv_heads, size=size, qkv=qkv, out=out, **buffers)
        self._task.run(attend_rows, qkv.dtype, torch.get_num_threads())
        return out
