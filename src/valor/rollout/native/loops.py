"""Loops over the numbers of a decode step, compiled by numba: norms, rotary embedding, attention, products.

Arrays come flat, with indices that cannot be negative: a slice costs more than what is done with it here, and loops
over other indices are not vectorized. Numbers are as in `vectors`.
"""

from typing import Any

import numpy as np

from valor.rollout.native.kv_cache import AT_ONCE, BLOCK
from valor.rollout.native.vectors import MOST_HEADS, add_rows, compiled, stored, wide

PANEL = 64  # columns of a weight that lie together
_LOG2_E, _LN_2, _HALF, _ONE = (np.float32(number) for number in (1 / np.log(2), np.log(2), 0.5, 1))
_GELU, _GELU_CUBE = np.float32(2 * np.sqrt(2 / np.pi)), np.float32(0.044715)
_LEAST, _MOST = np.float32(-87.0), np.float32(88.0)
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1 / number) for number in (2, 6, 24, 120, 720, 5040))


@compiled
def exponential(x: Any) -> Any:
    """e to the power of a float32 number: 0 below -87, and above 88 what it is at 88. A loop over it is vectorized.

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
    """out from `to` on: the row x [size] at `begin` over its root mean square, times the weight from `at` on."""
    begin, size, at, to, total = np.uintp(begin), np.uintp(size), np.uintp(at), np.uintp(to), np.float32(0.0)
    for c in range(size):
        total += wide(x[begin + c]) * wide(x[begin + c])
    scale = _ONE / np.sqrt(total / np.float32(size) + np.float32(eps))
    for c in range(size):
        out[to + c] = stored(out, wide(x[begin + c]) * scale * wide(weight[at + c]))


@compiled
def normalize_rows(x: Any, rows: Any, size: Any, weights: Any, at: Any, eps: Any, out: Any) -> Any:
    """`normalize` of every row. Returns the place behind the weight."""
    for row in range(rows):
        normalize(x, row * size, size, weights, at, eps, out, row * size)
    return at + size


@compiled
def activate(gate: Any, up: Any, count: Any, gelu: Any) -> None:
    """silu(gate) or gelu(gate) by tanh, times up, in gate's place."""
    for c in range(np.uintp(count)):
        x = gate[c]
        # (1 + tanh u) / 2 is the logistic function of 2 u.
        inner = _GELU * (x + _GELU_CUBE * x * x * x) if gelu else x
        gate[c] = x / (_ONE + exponential(-inner)) * up[c]


@compiled
def multiply(x: Any, rows: Any, size: Any, weights: Any, at: Any, columns: Any, out: Any, to: Any, add: Any) -> Any:
    """x [rows, size] W + b to out [rows, columns] from `to` on, or added to what is there. Returns the place behind.

    weights from `at` on: the columns of W in panels [size, PANEL], filled up to a whole one, and b as long.
    """
    sums, panels = np.empty(MOST_HEADS * PANEL, np.float32), (columns + PANEL - 1) // PANEL
    for panel in range(panels):
        first, begin = panel * PANEL, at + panel * size * PANEL
        count = min(PANEL, columns - first)
        filled, bias = count + -count % AT_ONCE, np.uintp(at + panels * size * PANEL + first)
        for row in range(0, rows, MOST_HEADS):
            many = min(MOST_HEADS, rows - row)
            for number in range(many):
                of_row = np.uintp(number * filled)
                for c in range(np.uintp(filled)):
                    sums[of_row + c] = weights[bias + c]
            add_rows(many, x, row * size, size, weights, begin, PANEL, size, filled, sums, None)
            for number in range(many):
                of_row, place = np.uintp(number * filled), np.uintp(to + (row + number) * columns + first)
                for c in range(np.uintp(count)):
                    out[place + c] = sums[of_row + c] + (out[place + c] if add else np.float32(0.0))
    return at + panels * PANEL * (size + 1)


@compiled
def clear(sums: Any, count: Any) -> None:
    """numba takes a second to compile an assignment to a slice."""
    for c in range(np.uintp(count)):
        sums[c] = 0.0


@compiled
def rotate(qkv: Any, begin: Any, cos: Any, sin: Any, at: Any, half: Any, by: Any, out: Any, to: Any) -> None:
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
        clear(sums, heads * together)
        add_rows(heads, query, at, size, keys, begin + column * size, BLOCK, size, together, sums, ahead)
        for number in range(heads):
            of_head, found = np.uintp(to + number * width + column), np.uintp(number * together)
            for c in range(np.uintp(together)):
                scores[of_head + c] = sums[found + c] if c < np.uintp(count - column) else np.float32(-np.inf)
    return to + filled


@compiled
def softmax(scores: Any, begin: Any, count: Any, tops: Any) -> None:
    """Of `count` scores, a multiple of eight, in their place. tops [8]: work space."""
    begin, count, eight, total = np.uintp(begin), np.uintp(count), np.uintp(AT_ONCE), np.float32(0.0)
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
    """Writes the new key and value of a row behind its columns, and to out [heads, D] from `to` on what its queries
    find in prompt and own columns.

    step: the numbers of a STEP; memory: its keys, values, prompt_keys, prompt_values; about: its cos, sin, lengths,
    prompts, starts; qkv: from `fed` on [heads + 2 kv heads, D]; space: what `work_space` makes.
    """
    keys, values, prompt_keys, prompt_values = memory
    cos, sin, lengths, prompts, starts = about
    turned, sums, scores, tops = space
    heads, kv_heads, size, width, scaling = step.heads, step.kv_heads, step.size, step.width, np.float32(step.scaling)
    group, next_row, next_prompt = heads // kv_heads, step.row_columns * size, step.prompt_columns * size
    start, own, angle, zero = starts[row], lengths[row], row * size, np.int64(0)
    for head in range(kv_heads):
        begin, prompt = (row * kv_heads + head) * next_row, (prompts[row] * kv_heads + head) * next_prompt
        rotate(qkv, fed + (heads + head) * size, cos, sin, angle, size // 2, _ONE, turned, zero)
        key, value = np.uintp(begin + own // BLOCK * size * BLOCK + own % BLOCK), np.uintp(begin + own * size)
        new = np.uintp(fed + (heads + kv_heads + head) * size)
        for d in range(np.uintp(size)):
            keys[key + d * np.uintp(BLOCK)] = stored(keys, turned[d])
            values[value + d] = stored(values, wide(qkv[new + d]))
        for number in range(group):
            one = fed + (head * group + number) * size
            rotate(qkv, one, cos, sin, angle, size // 2, scaling, turned, number * size)
        for number in range(0, group, MOST_HEADS):
            many = min(group - number, MOST_HEADS)
            asked = many, turned, number * size, size
            behind = score(asked, prompt_keys, prompt, start, next_prompt, sums, scores, zero, width)
            end = score(asked, keys, begin, own + 1, next_row, sums, scores, behind, width)
            for k in range(many):
                softmax(scores, k * width, end, tops)
            clear(sums, many * size)
            add_rows(many, scores, zero, width, prompt_values, prompt, size, behind, size, sums, next_prompt)
            add_rows(many, scores, behind, width, values, begin, size, end - behind, size, sums, next_row)
            place = np.uintp(to + (head * group + number) * size)
            for d in range(np.uintp(many * size)):
                out[place + d] = stored(out, sums[d])


@compiled
def work_space(step: Any) -> Any:
    """Of `attend`: turned heads, sums, scores and their largest."""
    turned = np.empty(step.heads // step.kv_heads * step.size, np.float32)
    sums = np.empty(MOST_HEADS * max(step.size, BLOCK), np.float32)
    return turned, sums, np.empty(MOST_HEADS * step.width, np.float32), np.empty(AT_ONCE, np.float32)
