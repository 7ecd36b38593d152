"""What numba lacks for the loops of a decode step: bfloat16 numbers, memory at an address, sums of rows in vectors.

Numbers are float32, or bfloat16, which numba does not know: such numbers are the upper halves of float32 ones, read
and written as uint16. Sums are float32 always.
"""

import itertools
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numba
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import extending, types
from numba.core import cgutils

from valor.rollout.native.kv_cache import SIMD_WIDTH

MOST_HEADS = 3  # that `add_rows` takes at once
LANES = 16 if get_host_cpu_features().get("avx512f") else 8  # of a vector

extension: Any = extending.intrinsic
BYTE, HALF, WORD, INT, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def compiled(function: Callable[..., Any], signature: Any = None) -> Any:
    """Compiled by numba; with a signature: to a C function. Sums are reordered, always in the same way; infinities and
    NaN stay what they are."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "contract", "nsz"}}
    make: Any = partial(numba.cfunc, signature)
    if signature is None:
        make = partial(numba.njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)
    try:
        return make(cache=True, **options)(function)
    except RuntimeError:  # there is no folder for numba's cache
        return make(**options)(function)


@extension
def wide(_context: Any, number: Any) -> Any:
    """The float32 number whose upper half this is, or itself if it is one."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return _wide(builder, args[0], WORD, FLOAT)

    return types.float32(number), generate


def _wide(builder: Any, number: Any, word: Any, floating: Any) -> Any:
    """`wide` of a number or a vector."""
    if number.type == floating:
        return number
    sixteen = [16] * word.count if isinstance(word, ir.VectorType) else 16
    return builder.bitcast(builder.shl(builder.zext(number, word), ir.Constant(word, sixteen)), floating)


@extension
def stored(_context: Any, array: Any, number: Any) -> Any:
    """A float32 number as `array` holds it: its upper half, rounded to the nearest, ties to even, or itself."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if array.dtype == types.float32:
            return args[1]
        bits = builder.bitcast(args[1], WORD)
        odd = builder.and_(builder.lshr(bits, WORD(16)), WORD(1))
        return builder.trunc(builder.lshr(builder.add(builder.add(bits, WORD(0x7FFF)), odd), WORD(16)), HALF)

    return array.dtype(array, types.float32), generate


@extension
def memory(_context: Any, address: Any) -> Any:
    """A pointer to the memory at an address, or at another pointer."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        turn = builder.inttoptr if isinstance(address, types.Integer) else builder.bitcast
        return turn(args[0], BYTE.as_pointer())

    return types.voidptr(address), generate


@extension
def numbers(_context: Any, like: Any, address: Any) -> Any:
    """A pointer to the numbers at an address, of the type that `like` points to."""
    return like(like, address), lambda _, builder, __, args: builder.inttoptr(args[1], args[0].type)


@extension
def take_next(_context: Any, counter: Any) -> Any:
    """The number at a pointer, which is then incremented atomically."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        pointer = builder.bitcast(args[0], INT.as_pointer())
        return builder.atomic_rmw("add", pointer, INT(1), "monotonic")

    return types.int64(counter), generate


@extension
def add_rows(
    _context: Any,
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
) -> Any:
    """sums[h count + c] += Σ_m a[at + h between + m] b[begin + m stride + c] for up to three heads h, all m below
    `rows` and all c below `count`, a multiple of eight.

    Written in vectors, because numba's own loop over c would load and store each sum for every m. Here sums stay in
    registers, and a number of b is read once for all heads.
    """
    arg_types = heads, a, at, between, b, begin, stride, rows, count, sums

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        def operand(kind: Any, value: Any) -> Any:
            if isinstance(kind, types.Array):
                return context.make_array(kind)(context, builder, value).data
            return context.cast(builder, value, kind, types.intp)

        n_heads, *operands = map(operand, arg_types, args)
        n_columns = operands[-2]
        for many in range(1, MOST_HEADS + 1):
            with builder.if_then(builder.icmp_signed("==", n_heads, INT(many))):
                done = INT(0)
                for vectors, lanes in dict.fromkeys([(4, LANES), (1, LANES), (1, SIMD_WIDTH)]):
                    step = INT(vectors * lanes)
                    end = builder.sub(n_columns, builder.srem(builder.sub(n_columns, done), step))
                    with cgutils.for_range_slice(builder, done, end, step) as (column, _count):
                        _add_columns(builder, operands, b.dtype.bitwidth // 8, (many, vectors, lanes), column)
                    done = end
        return context.get_dummy_value()

    return types.void(*arg_types), generate


def _add_columns(builder: Any, operands: list[Any], size: int, shape: tuple[int, int, int], column: Any) -> None:
    """Code of `add_rows` for the columns from `column` on. shape: heads, vectors and lanes of each; size: bytes of a
    number of b."""
    a, at, between, b, begin, stride, rows, count, sums = operands
    many, vectors, lanes = shape
    floats, of_b = ir.VectorType(FLOAT, lanes), ir.VectorType(FLOAT if size == 4 else HALF, lanes)
    undefined, spread = ir.Constant(floats, ir.Undefined), ir.Constant(ir.VectorType(WORD, lanes), None)

    def pointer(data: Any, kind: Any, *terms: Any) -> Any:
        return builder.bitcast(builder.gep(data, [reduce(builder.add, terms)]), kind.as_pointer())

    each = itertools.product(range(many), range(vectors))
    targets = [pointer(sums, floats, builder.mul(INT(h), count), column, INT(v * lanes)) for h, v in each]
    totals = [cgutils.alloca_once_value(builder, builder.load(target, align=4)) for target in targets]
    with cgutils.for_range(builder, rows) as loop:
        row = reduce(builder.add, (begin, builder.mul(loop.index, stride), column))
        columns = []
        for v in range(vectors):
            loaded = builder.load(pointer(b, of_b, row, INT(v * lanes)), align=size)
            columns.append(_wide(builder, loaded, ir.VectorType(WORD, lanes), floats))
        for h in range(many):
            scalar = builder.load(pointer(a, FLOAT, at, builder.mul(INT(h), between), loop.index))
            factor = builder.shuffle_vector(builder.insert_element(undefined, scalar, WORD(0)), undefined, spread)
            for v in range(vectors):
                total = totals[h * vectors + v]
                product = builder.fmul(factor, columns[v], flags=["contract"])
                builder.store(builder.fadd(builder.load(total), product, flags=["contract"]), total)
    for total, target in zip(totals, targets, strict=True):
        builder.store(builder.load(total), target, align=4)
