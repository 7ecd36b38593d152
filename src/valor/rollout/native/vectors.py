"""What numba lacks for the loops of a decode step: bfloat16 numbers, memory at an address, sums of rows in vectors.

Numbers are float32, or bfloat16, which numba does not know: such numbers are the upper halves of float32 ones, read
and written as uint16. Sums are float32 always.
"""

import functools
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numba
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import extending, types
from numba.core import cgutils

from valor.rollout.native.kv_cache import AT_ONCE

MOST_HEADS = 3  # that `add_rows` takes at once
LANES = 16 if get_host_cpu_features().get("avx512f") else 8  # of a vector
LINE = 64  # bytes that memory is fetched by

extension: Any = extending.intrinsic
BYTE, HALF, WORD, INT, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def compiled(function: Callable[..., Any], signature: Any = None) -> Any:
    """Sums may be taken in another order, which is always the same; infinities and NaN stay what they are. With a
    signature: a C function."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "contract", "nsz"}}
    make: Any = partial(numba.cfunc, signature)
    if signature is None:
        make = partial(numba.njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)
    try:
        return make(cache=True, **options)(function)
    except RuntimeError:  # there is no folder that numba could keep it in
        return make(**options)(function)


@extension
def wide(_context: Any, number: Any) -> Any:
    """The float32 number whose upper half this is, or itself if it is one."""

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        return _wide(builder, given[0], WORD, FLOAT)

    return types.float32(number), generate


def _wide(builder: Any, found: Any, word: Any, floating: Any) -> Any:
    """A number or a vector of them."""
    if found.type == floating:
        return found
    sixteen = [16] * word.count if isinstance(word, ir.VectorType) else 16
    return builder.bitcast(builder.shl(builder.zext(found, word), ir.Constant(word, sixteen)), floating)


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
    ahead: Any,
) -> Any:
    """sums[h count + c] += Σ_m a[at + h between + m] b[begin + m stride + c] for up to three heads h, all m below
    `rows` and all c below `count`, a multiple of eight. Meanwhile what is `ahead` in b is fetched, which comes next;
    None: nothing is.

    It is written in vectors: where numba vectorizes a loop over c, each sum is read and written for every m. Here sums
    stay in registers, and a number of b is read once for all heads.
    """
    given_types = heads, a, at, between, b, begin, stride, rows, count, sums, ahead

    def generate(context: Any, builder: Any, _: Any, given: Any) -> Any:
        found = [_operand(context, builder, kind, value) for kind, value in zip(given_types, given, strict=True)]
        block = _Block(builder, b.dtype, *found[1:8], *found[9:])
        for many in range(1, MOST_HEADS + 1):
            with builder.if_then(builder.icmp_signed("==", found[0], INT(many))):
                done = INT(0)
                for vectors, lanes in dict.fromkeys([(4, LANES), (1, LANES), (1, AT_ONCE)]):
                    size = INT(vectors * lanes)
                    end = builder.sub(found[8], builder.srem(builder.sub(found[8], done), size))
                    with cgutils.for_range_slice(builder, done, end, size) as (column, _count):
                        block.add(many, vectors, lanes, column, found[8])
                    done = end
        return context.get_dummy_value()

    return types.void(*given_types), generate


def _operand(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Where an array begins, or a number; None of None."""
    if isinstance(kind, types.Array):
        return context.make_array(kind)(context, builder, value).data
    return None if kind == types.none else context.cast(builder, value, kind, types.intp)


class _Block(NamedTuple):
    """Writes the code of `add_rows` for some columns."""

    builder: Any
    dtype: Any
    a: Any
    at: Any
    between: Any
    b: Any
    begin: Any
    stride: Any
    rows: Any
    sums: Any
    ahead: Any

    def add(self, heads: int, vectors: int, lanes: int, column: Any, count: Any) -> None:
        """Of `vectors` times `lanes` columns from `column` on."""
        builder, size = self.builder, self.dtype.bitwidth // 8
        floats, of_b = ir.VectorType(FLOAT, lanes), ir.VectorType(FLOAT if size == 4 else HALF, lanes)
        nothing, spread = ir.Constant(floats, ir.Undefined), ir.Constant(ir.VectorType(WORD, lanes), None)

        def place(data: Any, index: Any, kind: Any) -> Any:
            return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())

        def index(*terms: Any) -> Any:
            return functools.reduce(builder.add, terms)

        each = list(itertools.product(range(heads), range(vectors)))
        of_sums = [index(builder.mul(INT(h), count), column, INT(v * lanes)) for h, v in each]
        places = [place(self.sums, where, floats) for where in of_sums]
        held = [cgutils.alloca_once_value(builder, builder.load(where, align=4)) for where in places]
        with cgutils.for_range(builder, self.rows) as loop:
            row = index(self.begin, builder.mul(loop.index, self.stride), column)
            columns = []
            for v in range(vectors):
                numbers_of_b = builder.load(place(self.b, index(row, INT(v * lanes)), of_b), align=size)
                columns.append(_wide(builder, numbers_of_b, ir.VectorType(WORD, lanes), floats))
            for byte in range(0, vectors * lanes * size if self.ahead else 0, LINE):
                self._fetch(place(self.b, index(row, self.ahead, INT(byte // size)), BYTE))
            for h in range(heads):
                where = index(self.at, builder.mul(INT(h), self.between), loop.index)
                first = builder.insert_element(nothing, builder.load(place(self.a, where, FLOAT)), WORD(0))
                factor = builder.shuffle_vector(first, nothing, spread)
                for v in range(vectors):
                    total = held[h * vectors + v]
                    product = builder.fmul(factor, columns[v], flags=["contract"])
                    builder.store(builder.fadd(builder.load(total), product, flags=["contract"]), total)
        for total, where in zip(held, places, strict=True):
            builder.store(builder.load(total), where, align=4)

    def _fetch(self, place: Any) -> None:
        """Asks for the memory at a place, which need not exist, without waiting for it."""
        kind = ir.FunctionType(ir.VoidType(), [place.type, *[WORD] * 3])
        ask = self.builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        self.builder.call(ask, [place, *(WORD(number) for number in (0, 3, 1))])  # to read, often, data
