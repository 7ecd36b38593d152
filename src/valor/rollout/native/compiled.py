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

from valor.rollout.native.kv_cache import AT_ONCE, SlotCache
from valor.rollout.native.loops import attend, normalize, work_space
from valor.rollout.native.vectors import compiled, memory, numbers, taken

# What the loops are given: `next` is the first row that no thread has taken, `row_columns` and `prompt_columns` how
# many there are in memory; then the addresses of arrays, whose shapes the loops tell.
SIZES = ("next", "rows", "heads", "kv_heads", "size", "width", "row_columns", "prompt_columns")
ABOUT = ("cos", "sin", "lengths", "prompts", "starts")
MEMORY = ("keys", "values", "prompt_keys", "prompt_values")


def kind(integers: tuple[str, ...], floats: tuple[str, ...]) -> np.dtype:
    return np.dtype([(name, np.int64) for name in integers] + [(name, np.float64) for name in floats])


STEP = kind((*SIZES, *ABOUT, *MEMORY, "qkv", "out"), ("scaling",))
NORM = kind(("next", "rows", "size", "x", "weight", "out"), ("eps",))
_MANY_FOR_A_NORM = 2**16  # numbers: with fewer, a second thread costs more than it gains
MANY = 2**60  # numbers; no array is so long, and none is asked for its length


@compiled
def about_rows(step: Any) -> Any:
    """cos, sin, lengths, prompts, starts of a STEP or WHOLE."""
    cos, sin = carray(memory(step.cos), MANY, np.float32), carray(memory(step.sin), MANY, np.float32)
    lengths, prompts = carray(memory(step.lengths), MANY, np.int64), carray(memory(step.prompts), MANY, np.int64)
    return cos, sin, lengths, prompts, carray(memory(step.starts), MANY, np.int64)


def attend_rows(given: Any) -> None:
    """out [B, heads, D]: attention of each row's new token, whose key and value go behind the row's columns.

    given: where a STEP is, as a pointer to numbers of the dtype. Of that dtype: qkv [B, heads + 2 kv heads, D]; keys
    [_, kv heads, C / BLOCK, D, BLOCK] and values [_, kv heads, C, D] of the rows, of which lengths [B] columns are in
    use; prompt_keys like keys, of which row b sees starts[b] columns of prompts[b]. Of float32: cos, sin [B, D].
    """
    step = carray(memory(given), 1, STEP)[0]
    qkv, out = carray(numbers(given, step.qkv), MANY), carray(numbers(given, step.out), MANY)
    keys, values = carray(numbers(given, step.keys), MANY), carray(numbers(given, step.values), MANY)
    prompt_keys = carray(numbers(given, step.prompt_keys), MANY)
    prompt_values = carray(numbers(given, step.prompt_values), MANY)
    kept, about, space = (keys, values, prompt_keys, prompt_values), about_rows(step), work_space(step)
    each, row = (step.heads + 2 * step.kv_heads) * step.size, taken(given)
    while row < step.rows:
        attend(step, row, kept, about, qkv, row * each, out, row * step.heads * step.size, space)
        row = taken(given)


def scale_rows(given: Any) -> None:
    """out [N, D]: the rows x [N, D] over their root mean squares, times weight [D]. given: a NORM's place."""
    task = carray(memory(given), 1, NORM)[0]
    x, out = carray(numbers(given, task.x), MANY), carray(numbers(given, task.out), MANY)
    weight, row = carray(numbers(given, task.weight), MANY), taken(given)
    while row < task.rows:
        normalize(x, row * task.size, task.size, weight, 0, task.eps, out, row * task.size)
        row = taken(given)


# What the numbers of a dtype are to numba.
_KINDS: dict[torch.dtype, Any] = {torch.float32: types.float32, torch.bfloat16: types.uint16}


@cache
def _address(loop: Callable[[Any], None], dtype: torch.dtype) -> int:
    """Of a loop over numbers of this dtype, as a C function."""
    return compiled(loop, types.void(types.CPointer(_KINDS[dtype]))).address


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
    """What a loop is given: numbers, and addresses of tensors, which have to live as long."""

    def __init__(self, kind: np.dtype, **fields: float | Tensor) -> None:
        self._fields, self._held = np.zeros((), kind), fields
        self._place = self._fields.ctypes.data
        self.set(**fields)

    def set(self, **fields: float | Tensor) -> None:
        for name, value in fields.items():
            self._fields[name] = value.data_ptr() if isinstance(value, Tensor) else value

    def run(self, loop: Callable[[Any], None], dtype: torch.dtype, threads: int) -> None:
        self._fields["next"], in_threads, address = 0, _in_threads(), _address(loop, dtype)
        if in_threads is not None and threads > 1:
            in_threads(address, self._place, threads, 0)
        else:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(self._place)


class CompiledNorm:
    """Root mean square norm over the last dimension, in the dtype of `weight`."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._dtype, self._task = weight.dtype, Task(NORM, size=len(weight), weight=weight.contiguous(), eps=eps)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self._dtype).contiguous()
        out, threads = torch.empty_like(x), torch.get_num_threads() if x.numel() >= _MANY_FOR_A_NORM else 1
        self._task.set(rows=x.numel() // x.shape[-1], x=x, out=out)
        self._task.run(scale_rows, self._dtype, threads)
        return out


def fields_of_rows(cache: SlotCache, cos: Tensor, sin: Tensor) -> dict[str, Any]:
    """Fields of a STEP or WHOLE that tell of the rows."""
    width = cache.prompt_width + -cache.prompt_width % AT_ONCE + cache.width + -cache.width % AT_ONCE
    rows = {"lengths": cache.write_at, "prompts": cache.prompt_of, "starts": cache.starts}
    prompts = cache.prompts if cache.shared else cache.own
    columns = {"row_columns": cache.own.columns, "prompt_columns": prompts.columns}
    return {"rows": len(cos), "width": width, "cos": cos.float(), "sin": sin.float(), **rows, **columns}


def memory_of(cache: SlotCache, layer: int, like: Tensor) -> tuple[Tensor, ...]:
    """Keys and values of rows and of prompts; `like` [_, kv heads, _, D]."""
    own = cache.own.layer(layer, (like, like))
    return *own, *cache.prompts.layers.get(layer, own)


class CompiledStep:
    """Attention of one decode step of all layers; cos, sin [B, 1, D] of the new tokens."""

    def __init__(self, cache: SlotCache, cos: Tensor, sin: Tensor, heads: int, scaling: float) -> None:
        self._cache, self._heads = cache, heads
        self._task = Task(STEP, heads=heads, scaling=scaling, **fields_of_rows(cache, cos, sin))

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """[B, heads * D] from qkv [B, heads + 2 kv heads, D], which is contiguous."""
        kv_heads, size = (qkv.shape[1] - self._heads) // 2, qkv.shape[2]
        kept = dict(zip(MEMORY, memory_of(self._cache, layer, qkv[:, :kv_heads, None]), strict=True))
        out = qkv.new_empty(len(qkv), self._heads * size)
        self._task.set(kv_heads=kv_heads, size=size, qkv=qkv, out=out, **kept)
        self._task.run(attend_rows, qkv.dtype, torch.get_num_threads())
        return out
