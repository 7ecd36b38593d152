"""Loops over the numbers of a decode step, compiled by numba: norms, rotary embedding, attention, products.

Arrays come flat, with unsigned indices: a slice costs more than what is done with it here, and loops over signed
indices are not vectorized. Numbers are as in `vectors`.
"""

from typing import Any

import numpy as np

from valor.rollout.native.kv_cache import BLOCK, SIMD_WIDTH
from valor.rollout.native.vectors import MOST_HEADS, add_rows, compiled, stored, wide

PANEL = 64  # columns of a weight that lie together
_LOG2_E, _LN_2, _HALF, _ONE = (np.float32(number) for number in (1 / np.log(2), np.log(2), 0.5, 1))
_LEAST, _MOST = np.float32(-87.0), np.float32(88.0)
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1 / number) for number in (2, 6, 24, 120, 720, 5040))


@compiled
def exponential(x: Any) -> Any:
    """e^x in float32, in a form that vectorizes: 0 below -87, and constant above 88.

    2ⁿ times the series of the rest, which is at most ln 2 / 2.
    """
    nothing = x < _LEAST
    x = _LEAST if nothing else x  # NaN stays
    x = _MOST if x > _MOST else x
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN_2
    series = _ONE + r * (_ONE + r * (_C2 + r * (_C3 + r * (_C4 + r * (_C5 + r * (_C6 + r * _C7))))))
    return np.float32(0.0) if nothing else series * wide(np.uint16((np.int32(n) + 127) << 7))


@compiled
def normalize(x: Any, begin: Any, size: Any, weight: Any, at: Any, eps: Any, out: Any, to: Any) -> None:
    """out[to:] = the row x[begin:] [size] over its root mean square, times weight[at:]."""
    begin, size, at, to, total = np.uintp(begin), np.uintp(size), np.uintp(at), np.uintp(to), np.float32(0.0)
    for c in range(size):
        total += wide(x[begin + c]) * wide(x[begin + c])
    scale = _ONE / np.sqrt(total / np.float32(size) + np.float32(eps))
    for c in range(size):
        out[to + c] = stored(out, wide(x[begin + c]) * scale * wide(weight[at + c]))


@compiled
def normalize_rows(x: Any, rows: Any, size: Any, weights: Any, at: Any, eps: Any, out: Any) -> Any:
    """`normalize` of every row; returns the index after the weight."""
    for row in range(rows):
        normalize(x, row * size, size, weights, at, eps, out, row * size)
    return at + size


@compiled
def silu_times(gate: Any, up: Any, count: Any) -> None:
    """silu(gate) times up, in gate's memory."""
    for c in range(np.uintp(count)):
        gate[c] = gate[c] / (_ONE + exponential(-gate[c])) * up[c]


@compiled
def multiply(x: Any, rows: Any, size: Any, weights: Any, at: Any, columns: Any, out: Any, to: Any, add: Any) -> Any:
    """out[to:] [rows, columns] = x [rows, size] W + b, or that added to `out`; returns the index after weight and bias.

    weights[at:]: the columns of W in panels [size, PANEL], the last one padded, then b, padded as much.
    """
    sums, panels = np.empty(MOST_HEADS * PANEL, np.float32), (columns + PANEL - 1) // PANEL
    for panel in range(panels):
        first, begin = panel * PANEL, at + panel * size * PANEL
        count = min(PANEL, columns - first)
        filled, bias = count + -count % SIMD_WIDTH, np.uintp(at + panels * size * PANEL + first)
        for row in range(0, rows, MOST_HEADS):
            many = min(MOST_HEADS, rows - row)
            for number in range(many):
                of_row = np.uintp(number * filled)
                for c in range(np.uintp(filled)):
                    sums[of_row + c] = weights[bias + c]
            add_rows(many, x, row * size, size, weights, begin, PANEL, size, filled, sums)
            for number in range(many):
                of_row, target = np.uintp(number * filled), np.uintp(to + (row + number) * columns + first)
                for c in range(np.uintp(count)):
                    out[target + c] = sums[of_row + c] + (out[target + c] if add else np.float32(0.0))
    return at + panels * PANEL * (size + 1)


@compiled
def clear(sums: Any, count: Any) -> None:
    """numba takes a second to compile an assignment to a slice."""
    for c in range(np.uintp(count)):
        sums[c] = 0.0


@compiled
def rotate(qkv: Any, begin: Any, cos: Any, sin: Any, at: Any, half: Any, by: Any, out: Any, to: Any) -> None:
    """out[to:] = rotary embedding of the head qkv[begin:] [2 half] by cos[at:] and sin[at:], times `by`."""
    begin, at, half, to = np.uintp(begin), np.uintp(at), np.uintp(half), np.uintp(to)
    for d in range(half):
        low, high = wide(qkv[begin + d]), wide(qkv[begin + half + d])
        out[to + d] = (low * cos[at + d] - high * sin[at + d]) * by
        out[to + half + d] = (high * cos[at + half + d] + low * sin[at + half + d]) * by


@compiled
def score(queries: Any, keys: Any, begin: Any, count: Any, sums: Any, scores: Any, to: Any, width: Any) -> Any:
    """Scores [heads, width] from column `to` on with `count` keys from `begin` on, in blocks [D, BLOCK].

    -inf fills up to a multiple of eight; returns the column after them. queries: number of heads, their array, its
    first index, D.
    """
    heads, query, at, size = queries
    filled = count + -count % SIMD_WIDTH
    for column in range(0, count, BLOCK):
        together = min(BLOCK, filled - column)
        clear(sums, heads * together)
        add_rows(heads, query, at, size, keys, begin + column * size, BLOCK, size, together, sums)
        for number in range(heads):
            of_head, source = np.uintp(to + number * width + column), np.uintp(number * together)
            for c in range(np.uintp(together)):
                scores[of_head + c] = sums[source + c] if c < np.uintp(count - column) else np.float32(-np.inf)
    return to + filled


@compiled
def softmax(scores: Any, begin: Any, count: Any, tops: Any) -> None:
    """In place, of scores[begin:] [count], a multiple of eight. tops [8]: work space."""
    begin, count, eight, total = np.uintp(begin), np.uintp(count), np.uintp(SIMD_WIDTH), np.float32(0.0)
    for c in range(eight):
        tops[c] = scores[begin + c]
    for first in range(begin, begin + count, eight):
        for c in range(eight):
            tops[c] = scores[first + c] if scores[first + c] > tops[c] else tops[c]
    most = tops[0]
    for c in range(eight):
        most = tops[c] if tops[c] > most else most
    for c in range(count):
        scores[begin + c] = exponential(scores[begin + c] - most)
        total += scores[begin + c]
    share = _ONE / total
    for c in range(count):
        scores[begin + c] *= share


@compiled
def attend(step: Any, row: Any, memory: Any, about: Any, qkv: Any, fed: Any, out: Any, to: Any, space: Any) -> None:
    """Attention out[to:] [heads, D] of a row's new token over its prompt and its own columns, which it joins.

    step: a STEP; memory: keys, values, prompt_keys, prompt_values; about: cos, sin, lengths, prompts, starts;
    qkv[fed:] [heads + 2 kv heads, D]; space: `work_space`.
    """
    keys, values, prompt_keys, prompt_values = memory
    cos, sin, lengths, prompts, starts = about
    turned, sums, scores, tops = space
    heads, kv_heads, size, width, scaling = step.heads, step.kv_heads, step.size, step.width, np.float32(step.scaling)
    group, next_row, next_prompt = heads // kv_heads, step.row_columns * size, step.prompt_columns * size
    start, length, angle, zero = starts[row], lengths[row], row * size, np.int64(0)
    for head in range(kv_heads):
        begin, prompt = (row * kv_heads + head) * next_row, (prompts[row] * kv_heads + head) * next_prompt
        rotate(qkv, fed + (heads + head) * size, cos, sin, angle, size // 2, _ONE, turned, zero)
        key, value = np.uintp(begin + length // BLOCK * size * BLOCK + length % BLOCK), np.uintp(begin + length * size)
        new = np.uintp(fed + (heads + kv_heads + head) * size)
        for d in range(np.uintp(size)):
            keys[key + d * np.uintp(BLOCK)] = stored(keys, turned[d])
            values[value + d] = stored(values, wide(qkv[new + d]))
        for number in range(group):
            query = fed + (head * group + number) * size
            rotate(qkv, query, cos, sin, angle, size // 2, scaling, turned, number * size)
        for number in range(0, group, MOST_HEADS):
            many = min(group - number, MOST_HEADS)
            queries = many, turned, number * size, size
            middle = score(queries, prompt_keys, prompt, start, sums, scores, zero, width)
            end = score(queries, keys, begin, length + 1, sums, scores, middle, width)
            for k in range(many):
                softmax(scores, k * width, end, tops)
            clear(sums, many * size)
            add_rows(many, scores, zero, width, prompt_values, prompt, size, middle, size, sums)
            add_rows(many, scores, middle, width, values, begin, size, end - middle, size, sums)
            target = np.uintp(to + (head * group + number) * size)
            for d in range(np.uintp(many * size)):
                out[target + d] = stored(out, sums[d])


@compiled
def work_space(step: Any) -> Any:
    """Of `attend`: rotated heads, sums, scores and their largest."""
    turned = np.empty(step.heads // step.kv_heads * step.size, np.float32)
    sums = np.empty(MOST_HEADS * max(step.size, BLOCK), np.float32)
    return turned, sums, np.empty(MOST_HEADS * step.width, np.float32), np.empty(SIMD_WIDTH, np.float32)
