"""Loops over the numbers of a decode step's attention, compiled by numba: sums of rows, rotary embedding, scores.

Numbers are float32, or bfloat16, which numba does not know: such numbers are the upper halves of float32 ones, read
and written as uint16. Sums are float32 always.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import extending, types

from valor.rollout.native.kv_cache import AT_ONCE, BLOCK

_1, _2, _3, _4 = (np.uintp(number) for number in range(1, 5))
_LINE = np.uintp(64)  # bytes that memory is fetched by

extension: Any = extending.intrinsic
BYTE, HALF, WORD, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()


def compiled(function: Callable[..., Any], signature: Any = None) -> Any:
    """Sums may be taken in another order, which is always the same; infinities and NaN stay what they are. With a
    signature: a C function."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "contract", "nsz"}}
    make: Any = numba.njit if signature is None else partial(numba.cfunc, signature)
    try:
        return make(cache=True, **options)(function)
    except RuntimeError:  # there is no folder that numba could keep it in
        return make(**options)(function)


@extension
def wide(_context: Any, number: Any) -> Any:
    """The float32 number whose upper half this is, or itself if it is one."""

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        if number == types.float32:
            return given[0]
        return builder.bitcast(builder.shl(builder.zext(given[0], WORD), WORD(16)), FLOAT)

    return types.float32(number), generate


@extension
def stored(_context: Any, array: Any, number: Any) -> Any:
    """A float32 number as `array` holds it: its upper half, rounded to the nearest, ties to even, or itself."""

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        if array.dtype == types.float32:
            return given[1]
        bits = builder.bitcast(given[1], WORD)
        odd = builder.and_(builder.lshr(bits, WORD(16)), WORD(1))
        return builder.trunc(builder.lshr(builder.add(builder.add(bits, WORD(0x7FFF)), odd), WORD(16)), HALF)

    return array.dtype(array, types.float32), generate


@extension
def memory(_context: Any, address: Any) -> Any:
    """A pointer to the memory at an address, or at another pointer."""

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        turn = builder.inttoptr if isinstance(address, types.Integer) else builder.bitcast
        return turn(given[0], BYTE.as_pointer())

    return types.voidptr(address), generate


@extension
def numbers(_context: Any, like: Any, address: Any) -> Any:
    """A pointer to the numbers at an address, which are of the kind that `like` points to."""
    return like(like, address), lambda _, builder, __, given: builder.inttoptr(given[1], given[0].type)


@extension
def taken(_context: Any, counter: Any) -> Any:
    """The number at a pointer, which is then one more: no two threads get the same."""

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        place = builder.bitcast(given[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, ir.IntType(64)(1), "monotonic")

    return types.int64(counter), generate


@extension
def fetch(_context: Any, array: Any, index: Any) -> Any:
    """Asks for the memory at array[index], which need not exist, without waiting for it."""

    def generate(context: Any, builder: Any, _: Any, given: Any) -> Any:
        data = context.make_array(array)(context, builder, given[0]).data
        place = builder.bitcast(builder.gep(data, [given[1]]), BYTE.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, *[WORD] * 3])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(ask, [place, *(WORD(number) for number in (0, 3, 1))])  # to read, often, data
        return context.get_dummy_value()

    return types.void(array, types.uintp), generate


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
        for k in range(np.uintp(m * stride), np.uintp((m + together) * stride), _LINE // np.uintp(b.itemsize)):
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
    asked: Any, keys: Any, begin: Any, count: Any, ahead: Any, sums: Any, scores: Any, to: Any, width: Any
) -> Any:
    """Scores of query heads [D] with the `count` keys from `begin` on, which lie in blocks [D, BLOCK], to scores
    [heads, width] from `to` on; -inf fills up to a multiple of eight. Returns where the next are to go.

    asked: how many heads, their array, where in it they begin, D."""
    heads, query, at, size = asked
    filled = count + -count % AT_ONCE
    for column in range(0, count, BLOCK):
        together = min(BLOCK, filled - column)
        sums[: heads * together] = 0.0
        add_rows(heads, query, at, size, keys, begin + column * size, BLOCK, size, together, sums, ahead)
        for number in range(heads):
            of_head, found = np.uintp(to + number * width + column), np.uintp(number * together)
            for c in range(np.uintp(together)):
                scores[of_head + c] = sums[found + c] if c < np.uintp(count - column) else np.float32(-np.inf)
    return to + filled
