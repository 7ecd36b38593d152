"""Attention of one new token per row in bfloat16 on CPUs, in two compiled loops: rotary embedding, new column and
scores; sums of values.

As tensor operations it is some thirty small ones a layer, over rows padded to the longest of them; here each row is
read to its own length, once, and its products are in float32. numba compiles the loops at first use and keeps the
result on disk. It does not know bfloat16: such numbers are the upper halves of float32 ones, read and written as
uint16. In float32 the tensor operations are faster (benchmarks/rollout_speed.py: short rows, few heads), and stay.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import extending, types
from torch import Tensor

from valor.rollout.native.kv_cache import AT_ONCE, BLOCK, SlotCache, as_array

_1, _2, _3, _4 = (np.uintp(number) for number in range(1, 5))
_LINE = np.uintp(32)  # numbers of bfloat16 in 64 bytes


extension: Any = extending.intrinsic


def compiled(function: Callable[..., Any]) -> Any:
    """Sums may be taken in another order, which is always the same; infinities and NaN stay what they are."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "contract", "nsz"}}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # there is no folder that numba could keep it in
        return numba.njit(**options)(function)


@extension
def float_of(_context: Any, bits: Any) -> Any:
    """The float32 number of these 32 bits."""
    return types.float32(types.uint32), lambda _, builder, __, given: builder.bitcast(given[0], ir.FloatType())


@extension
def bits_of(_context: Any, number: Any) -> Any:
    """The 32 bits of this float32 number."""
    return types.uint32(types.float32), lambda _, builder, __, given: builder.bitcast(given[0], ir.IntType(32))


@extension
def fetch(_context: Any, array: Any, index: Any) -> Any:
    """Asks for the memory at array[index], which need not exist, without waiting for it."""

    def generate(context: Any, builder: Any, _: Any, given: Any) -> Any:
        data = context.make_array(array)(context, builder, given[0]).data
        place = builder.bitcast(builder.gep(data, [given[1]]), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, *[ir.IntType(32)] * 3])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(ask, [place, *(ir.IntType(32)(number) for number in (0, 3, 1))])  # to read, often, data
        return context.get_dummy_value()

    return types.void(array, types.uintp), generate


@compiled
def wide(number: Any) -> Any:
    """The float32 number whose upper half this is."""
    return float_of(np.uint32(number) << np.uint32(16))


@compiled
def rounded(number: Any) -> Any:
    """The upper half of a float32 number, rounded to the nearest, ties to even."""
    bits = bits_of(number)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


# Arrays come flat, with indices that cannot be negative: a slice costs more than what is done with it here, and loops
# over other indices are not vectorized. Several rows and heads at a time: a sum is read and written less often, and a
# number read for three heads at once.


@compiled
def add_one(a: Any, at: Any, b: Any, begin: Any, stride: Any, count: Any, sums: Any) -> None:
    """sums[c] += Σ_m a[at + m] b[begin + m stride + c] for eight m and all c below `count`."""
    at, i, n = np.uintp(at), np.uintp(begin), np.uintp(stride)
    a0, a1, a2, a3 = a[at], a[at + _1], a[at + _2], a[at + _3]
    at += _4
    a4, a5, a6, a7 = a[at], a[at + _1], a[at + _2], a[at + _3]
    for c in range(np.uintp(count)):
        low, high = i + c, i + _4 * n + c
        sum_low = (a0 * wide(b[low]) + a1 * wide(b[low + n])) + (
            a2 * wide(b[low + _2 * n]) + a3 * wide(b[low + _3 * n])
        )
        sums[c] += sum_low + (
            (a4 * wide(b[high]) + a5 * wide(b[high + n])) + (a6 * wide(b[high + _2 * n]) + a7 * wide(b[high + _3 * n]))
        )


@compiled
def add_three(a: Any, at: Any, between: Any, b: Any, begin: Any, stride: Any, count: Any, sums: Any) -> None:
    """sums[h count + c] += Σ_m a[at + h between + m] b[begin + m stride + c] for four m and three h."""
    at, i, n, size = np.uintp(at), np.uintp(begin), np.uintp(stride), np.uintp(count)
    a0, a1, a2, a3 = a[at], a[at + _1], a[at + _2], a[at + _3]
    at += np.uintp(between)
    b0, b1, b2, b3 = a[at], a[at + _1], a[at + _2], a[at + _3]
    at += np.uintp(between)
    c0, c1, c2, c3 = a[at], a[at + _1], a[at + _2], a[at + _3]
    for c in range(size):
        w0, w1, w2, w3 = wide(b[i + c]), wide(b[i + n + c]), wide(b[i + _2 * n + c]), wide(b[i + _3 * n + c])
        sums[c] += (a0 * w0 + a1 * w1) + (a2 * w2 + a3 * w3)
        sums[size + c] += (b0 * w0 + b1 * w1) + (b2 * w2 + b3 * w3)
        sums[_2 * size + c] += (c0 * w0 + c1 * w1) + (c2 * w2 + c3 * w3)


@compiled
def add_rows(
    heads: Any,
    a: Any,
    at: Any,
    between: Any,
    b: Any,
    begin: Any,
    stride: Any,
    rows: Any,
    count: Any,
    sums: Any,
    ahead: Any,
) -> None:
    """sums [h, c] += Σ_m a[at + h between + m] b[begin + m stride + c] for one or three heads h and all m below `rows`,
    a multiple of eight. Meanwhile what lies `ahead` is fetched, which comes next."""
    together = 4 if heads == 3 else AT_ONCE
    for m in range(0, rows, together):
        for k in range(np.uintp(m * stride), np.uintp((m + together) * stride), _LINE):
            fetch(b, np.uintp(begin + ahead) + k)
        if heads == 3:
            add_three(a, at + m, between, b, begin + m * stride, stride, count, sums)
        else:
            add_one(a, at + m, b, begin + m * stride, stride, count, sums)


@compiled
def rotate(qkv: Any, begin: Any, cos: Any, sin: Any, at: Any, half: Any, by: float, out: Any, to: Any) -> None:
    """Rotary embedding of the head [2 half] at `begin` times `by`, by cos and sin from `at` on, to out from `to` on."""
    begin, at, half, to = np.uintp(begin), np.uintp(at), np.uintp(half), np.uintp(to)
    for d in range(half):
        low, high = wide(qkv[begin + d]), wide(qkv[begin + half + d])
        out[to + d] = (low * cos[at + d] - high * sin[at + d]) * by
        out[to + half + d] = (high * cos[at + half + d] + low * sin[at + half + d]) * by


@compiled
def score(
    heads: Any,
    query: Any,
    at: Any,
    size: Any,
    keys: Any,
    begin: Any,
    count: Any,
    sums: Any,
    scores: Any,
    to: Any,
    width: Any,
    ahead: Any,
) -> int:
    """Scores of query heads [D] with the `count` keys from `begin` on, which lie in blocks [D, BLOCK], to scores
    [heads, width] from `to` on; -inf fills up to a multiple of eight. Returns where the next are to go."""
    filled = count + -count % AT_ONCE
    for column in range(0, count, BLOCK):
        sums[:] = 0.0
        add_rows(heads, query, at, size, keys, begin + column * size, BLOCK, size, BLOCK, sums, ahead)
        for number in range(heads):
            of_head, found = np.uintp(to + number * width + column), np.uintp(number * BLOCK)
            for c in range(np.uintp(min(BLOCK, filled - column))):
                scores[of_head + c] = sums[found + c] if c < np.uintp(count - column) else np.float32(-np.inf)
    return to + filled


@compiled
def extend_and_score(
    shape: tuple[int, int, int, int],
    qkv: Any,
    cos: Any,
    sin: Any,
    scaling: float,
    keys: Any,
    values: Any,
    prompt_keys: Any,
    columns: tuple[int, int],
    lengths: Any,
    prompts: Any,
    starts: Any,
    scores: Any,
) -> None:
    """Writes each row's new key and value behind its columns, and scores [B, heads, W] of prompt and own columns.

    shape: heads, kv heads, D, W; columns: those of rows and prompts in memory, C. qkv [B, heads + 2 kv heads, D]; cos,
    sin [B, D]; keys [_, kv heads, C / BLOCK, D, BLOCK] and values [_, kv heads, C, D] of the rows, of which lengths [B]
    columns are in use; prompt_keys like keys, of which row b sees starts[b] columns of prompts[b].
    """
    heads, kv_heads, size, width = shape
    group = heads // kv_heads
    turned, sums = np.empty(group * size, np.float32), np.empty(3 * BLOCK, np.float32)
    for row in range(len(lengths)):
        start, own, fed = starts[row], lengths[row], row * (heads + 2 * kv_heads) * size
        for head in range(kv_heads):
            begin, prompt = (
                (row * kv_heads + head) * columns[0] * size,
                (prompts[row] * kv_heads + head) * columns[1] * size,
            )
            rotate(qkv, fed + (heads + head) * size, cos, sin, row * size, size // 2, np.float32(1.0), turned, 0)
            key, value = np.uintp(begin + own // BLOCK * size * BLOCK + own % BLOCK), np.uintp(begin + own * size)
            given = np.uintp(fed + (heads + kv_heads + head) * size)
            for d in range(np.uintp(size)):
                keys[key + d * np.uintp(BLOCK)] = rounded(turned[d])
                values[value + d] = qkv[given + d]
            for number in range(group):
                one = fed + (head * group + number) * size
                rotate(qkv, one, cos, sin, row * size, size // 2, np.float32(scaling), turned, number * size)
            number = 0
            while number < group:
                many = 3 if group - number >= 3 else 1
                to = (row * heads + head * group + number) * width
                end = score(
                    many,
                    turned,
                    number * size,
                    size,
                    prompt_keys,
                    prompt,
                    start,
                    sums,
                    scores,
                    to,
                    width,
                    columns[1] * size,
                )
                end = score(
                    many, turned, number * size, size, keys, begin, own + 1, sums, scores, end, width, columns[0] * size
                )
                for k in range(many):
                    scores[end + k * width : to + (k + 1) * width] = -np.inf
                number += many


@compiled
def sum_values(
    shape: tuple[int, int, int, int],
    weights: Any,
    values: Any,
    prompt_values: Any,
    columns: tuple[int, int],
    lengths: Any,
    prompts: Any,
    starts: Any,
    out: Any,
) -> None:
    """out [B, heads, D]: the values of prompt and own columns by weights [B, heads, W]; as in `extend_and_score`."""
    heads, kv_heads, size, width = shape
    group = heads // kv_heads
    sums = np.empty(3 * size, np.float32)
    for row in range(len(lengths)):
        start, own = starts[row] + -starts[row] % AT_ONCE, lengths[row] + 1
        own += -own % AT_ONCE
        for head in range(kv_heads):
            begin, prompt = (
                (row * kv_heads + head) * columns[0] * size,
                (prompts[row] * kv_heads + head) * columns[1] * size,
            )
            number = 0
            while number < group:
                many, first = 3 if group - number >= 3 else 1, row * heads + head * group + number
                sums[:] = 0.0
                add_rows(
                    many,
                    weights,
                    first * width,
                    width,
                    prompt_values,
                    prompt,
                    size,
                    start,
                    size,
                    sums,
                    columns[1] * size,
                )
                add_rows(
                    many, weights, first * width + start, width, values, begin, size, own, size, sums, columns[0] * size
                )
                to = np.uintp(first * size)
                for d in range(np.uintp(many * size)):
                    out[to + d] = rounded(sums[d])
                number += many


class CompiledStep:
    """Attention of one decode step of all layers; cos, sin [B, 1, D] of the new tokens."""

    def __init__(self, cache: SlotCache, cos: Tensor, sin: Tensor, heads: Any, scaling: float) -> None:
        self._cache = cache
        self._rotary = (*(x.float().numpy().reshape(-1) for x in (cos, sin)), scaling)
        rows = tuple(x.numpy() for x in (cache.write_at, cache.prompt_of, cache.starts))
        self._seen = ((cache.own.columns, (cache.prompts if cache.shared else cache.own).columns), *rows)
        lengths, _, starts = rows
        width = (starts + -starts % AT_ONCE + lengths + 1).max()
        self._scores = torch.empty(len(cos), heads, int(width + -width % AT_ONCE))

    def __call__(self, layer: Any, qkv: Tensor) -> Tensor:
        """[B, heads * D] from qkv [B, heads + 2 kv heads, D], which is contiguous."""
        keys, values, prompt_keys, prompt_values = self._cache.arrays(layer)
        rows, heads, width = self._scores.shape
        shape = (heads, (qkv.shape[1] - heads) // 2, qkv.shape[2], width)
        given = (as_array(qkv), *self._rotary, keys, values, prompt_keys)
        extend_and_score(shape, *given, *self._seen, self._scores.numpy().reshape(-1))
        weights = torch.softmax(self._scores, dim=-1)
        out = qkv.new_empty(rows, heads * qkv.shape[2])
        given = (weights.numpy().reshape(-1), values, prompt_values)
        sum_values(shape, *given, *self._seen, as_array(out))
        return out
