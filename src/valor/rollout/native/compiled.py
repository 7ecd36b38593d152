"""What a decode step does on CPUs beside products with weights, in compiled loops over the rows: norms, and attention
of one new token per row (rotary embedding, new column and scores; sums of values).

As tensor operations attention is some thirty small ones a layer, over rows padded to the longest of them; here each row
is read to its own length, once, by whichever of torch's threads is free. numba compiles the loops at first use and
keeps the result on disk.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import carray, types
from torch import Tensor

from valor.rollout.native.kv_cache import AT_ONCE, BLOCK, SlotCache
from valor.rollout.native.loops import (
    MOST_HEADS,
    add_rows,
    compiled,
    memory,
    numbers,
    rotate,
    score,
    stored,
    taken,
    wide,
)

# What the loops are given: `next` is the first row that no thread has taken, `row_columns` and `prompt_columns` how
# many there are in memory; then the addresses of arrays, whose shapes the loops tell.
_SIZES = ("next", "rows", "heads", "kv_heads", "size", "width", "row_columns", "prompt_columns")
_ARRAYS = ("qkv", "cos", "sin", "keys", "values", "prompt_keys", "prompt_values", "lengths", "prompts", "starts")
STEP = np.dtype([(name, np.int64) for name in (*_SIZES, *_ARRAYS, "scores", "out")] + [("scaling", np.float64)])
NORM = np.dtype([(name, np.int64) for name in ("next", "rows", "size", "x", "weight", "out")] + [("eps", np.float64)])
_MANY_FOR_A_NORM = 2**16  # numbers: with fewer, a second thread costs more than it gains
_MANY = 2**60  # numbers; no array is so long, and none is asked for its length


def extend_and_score(given: Any) -> None:
    """Writes each row's new key and value behind its columns, and scores [B, heads, width] of prompt and own columns.

    given: where a STEP is, as a pointer to numbers of the dtype. Of that dtype: qkv [B, heads + 2 kv heads, D]; keys
    [_, kv heads, C / BLOCK, D, BLOCK] and values [_, kv heads, C, D] of the rows, of which lengths [B] columns are in
    use; prompt_keys like keys, of which row b sees starts[b] columns of prompts[b]. Of float32: cos, sin [B, D];
    scores.
    """
    task = carray(memory(given), 1, STEP)[0]
    qkv, prompt_keys = carray(numbers(given, task.qkv), _MANY), carray(numbers(given, task.prompt_keys), _MANY)
    keys, values = carray(numbers(given, task.keys), _MANY), carray(numbers(given, task.values), _MANY)
    cos, sin = carray(memory(task.cos), _MANY, np.float32), carray(memory(task.sin), _MANY, np.float32)
    scores = carray(memory(task.scores), _MANY, np.float32)
    lengths, prompts = carray(memory(task.lengths), _MANY, np.int64), carray(memory(task.prompts), _MANY, np.int64)
    starts, scaling = carray(memory(task.starts), _MANY, np.int64), np.float32(task.scaling)
    rows, heads, kv_heads, size, width = task.rows, task.heads, task.kv_heads, task.size, task.width
    group, next_row, next_prompt = heads // kv_heads, task.row_columns * size, task.prompt_columns * size
    turned, sums = np.empty(group * size, np.float32), np.empty(MOST_HEADS * BLOCK, np.float32)
    row = taken(given)
    while row < rows:
        start, own, fed = starts[row], lengths[row], row * (heads + 2 * kv_heads) * size
        for head in range(kv_heads):
            begin, prompt = (row * kv_heads + head) * next_row, (prompts[row] * kv_heads + head) * next_prompt
            rotate(qkv, fed + (heads + head) * size, cos, sin, row * size, size // 2, np.float32(1.0), turned, 0)
            key, value = np.uintp(begin + own // BLOCK * size * BLOCK + own % BLOCK), np.uintp(begin + own * size)
            new = np.uintp(fed + (heads + kv_heads + head) * size)
            for d in range(np.uintp(size)):
                keys[key + d * np.uintp(BLOCK)] = stored(keys, turned[d])
                values[value + d] = qkv[new + d]
            for number in range(group):
                one = fed + (head * group + number) * size
                rotate(qkv, one, cos, sin, row * size, size // 2, scaling, turned, number * size)
            number = 0
            while number < group:
                many = min(group - number, MOST_HEADS)
                to = (row * heads + head * group + number) * width
                asked = (many, turned, number * size, size)
                end = score(asked, prompt_keys, prompt, start, next_prompt, sums, scores, to, width)
                end = score(asked, keys, begin, own + 1, next_row, sums, scores, end, width)
                for k in range(many):
                    scores[end + k * width : to + (k + 1) * width] = -np.inf
                number += many
        row = taken(given)


def sum_values(given: Any) -> None:
    """out [B, heads, D]: the values of prompt and own columns by weights [B, heads, width], which are in the place of
    scores; the rest as in `extend_and_score`."""
    task = carray(memory(given), 1, STEP)[0]
    values, out = carray(numbers(given, task.values), _MANY), carray(numbers(given, task.out), _MANY)
    prompt_values = carray(numbers(given, task.prompt_values), _MANY)
    weights = carray(memory(task.scores), _MANY, np.float32)
    lengths, prompts = carray(memory(task.lengths), _MANY, np.int64), carray(memory(task.prompts), _MANY, np.int64)
    starts = carray(memory(task.starts), _MANY, np.int64)
    rows, heads, kv_heads, size, width = task.rows, task.heads, task.kv_heads, task.size, task.width
    group, next_row, next_prompt = heads // kv_heads, task.row_columns * size, task.prompt_columns * size
    sums = np.empty(MOST_HEADS * size, np.float32)
    row = taken(given)
    while row < rows:
        start, own = starts[row] + -starts[row] % AT_ONCE, lengths[row] + 1
        own += -own % AT_ONCE
        for head in range(kv_heads):
            begin, prompt = (row * kv_heads + head) * next_row, (prompts[row] * kv_heads + head) * next_prompt
            number = 0
            while number < group:
                many, first = min(group - number, MOST_HEADS), row * heads + head * group + number
                sums[:] = 0.0
                at = first * width
                add_rows(many, weights, at, width, prompt_values, prompt, size, start, size, sums, next_prompt)
                add_rows(many, weights, at + start, width, values, begin, size, own, size, sums, next_row)
                to = np.uintp(first * size)
                for d in range(np.uintp(many * size)):
                    out[to + d] = stored(out, sums[d])
                number += many
        row = taken(given)


def scale_rows(given: Any) -> None:
    """out [N, D]: the rows x [N, D] over their root mean squares, times weight [D]. given: a NORM's place."""
    task = carray(memory(given), 1, NORM)[0]
    x, out = carray(numbers(given, task.x), _MANY), carray(numbers(given, task.out), _MANY)
    weight = carray(numbers(given, task.weight), _MANY)
    rows, size, eps, row = task.rows, np.uintp(task.size), np.float32(task.eps), taken(given)
    while row < rows:
        begin, total = np.uintp(row) * size, np.float32(0.0)
        for c in range(size):
            total += wide(x[begin + c]) * wide(x[begin + c])
        scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        for c in range(size):
            out[begin + c] = stored(out, wide(x[begin + c]) * scale * wide(weight[c]))
        row = taken(given)


# By name, and what the numbers of a dtype are to numba.
_LOOPS: dict[str, Any] = {"score": extend_and_score, "sum": sum_values, "scale": scale_rows}
_KINDS: dict[torch.dtype, Any] = {torch.float32: types.float32, torch.bfloat16: types.uint16}


@cache
def _address(loop: str, dtype: torch.dtype) -> int:
    """Of a loop over numbers of this dtype, as a C function."""
    return compiled(_LOOPS[loop], types.void(types.CPointer(_KINDS[dtype]))).address


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

    def run(self, loop: str, dtype: torch.dtype, threads: int) -> None:
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
        self._task.run("scale", self._dtype, threads)
        return out


class CompiledStep:
    """Attention of one decode step of all layers; cos, sin [B, 1, D] of the new tokens."""

    def __init__(self, cache: SlotCache, cos: Tensor, sin: Tensor, heads: int, scaling: float) -> None:
        self._cache, self._heads = cache, heads
        width = cache.prompt_width + -cache.prompt_width % AT_ONCE + cache.width + -cache.width % AT_ONCE
        self._scores = torch.empty(len(cos), heads, width)
        rows: dict[str, Any] = {"lengths": cache.write_at, "prompts": cache.prompt_of, "starts": cache.starts}
        rows |= {"rows": len(cos), "cos": cos.float(), "sin": sin.float()}
        prompts = cache.prompts if cache.shared else cache.own
        columns = {"row_columns": cache.own.columns, "prompt_columns": prompts.columns}
        self._task = Task(STEP, heads=heads, width=width, scaling=scaling, **rows, **columns)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """[B, heads * D] from qkv [B, heads + 2 kv heads, D], which is contiguous."""
        kv_heads, size, threads = (qkv.shape[1] - self._heads) // 2, qkv.shape[2], torch.get_num_threads()
        like = qkv[:, :kv_heads, None]
        keys, values = self._cache.own.layer(layer, (like, like))
        prompt_keys, prompt_values = self._cache.prompts.layers.get(layer, (keys, values))
        self._task.set(kv_heads=kv_heads, size=size, qkv=qkv, keys=keys, values=values, scores=self._scores)
        self._task.set(prompt_keys=prompt_keys, prompt_values=prompt_values)
        self._task.run("score", qkv.dtype, threads)
        out = qkv.new_empty(len(qkv), self._heads * size)
        weights = torch.softmax(self._scores, dim=-1)
        self._task.set(scores=weights, out=out)
        self._task.run("sum", qkv.dtype, threads)
        return out
