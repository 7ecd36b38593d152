"""A whole decode step of a small model on CPUs in one compiled loop over the rows, from embeddings to logits.

Such a model's weights fit into the processor's caches, and a step by tensor operations spends its time in starting
them and in waiting for the slowest thread of each.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray
from torch import Tensor

from valor.rollout.native.compiled import ABOUT, MANY, SIZES, Task, about_rows, fields_of_rows, kind, memory_of
from valor.rollout.native.kv_cache import SlotCache
from valor.rollout.native.loops import PANEL, activate, attend, multiply, normalize, normalize_rows, work_space
from valor.rollout.native.vectors import MOST_HEADS, memory, taken

# `together` rows go through all layers; places [layers, 4] are the addresses of each layer's memory.
_WHOLE = ("layers", "hidden", "inner", "vocab", "head_norms", "gelu", "together", "x", "weights", "places", "logits")
WHOLE = kind((*SIZES, *ABOUT, *_WHOLE), ("scaling", "eps"))
_MOST_TOGETHER = 48  # rows: with more, what lies between two layers leaves the nearest cache


def whole_step(given: Any) -> None:
    """logits [B, vocab] from the embeddings x [B, hidden] of the new tokens. given: where a WHOLE is.

    A thread takes `together` rows through all layers: rows need nothing from each other, so no thread ever waits.
    weights: as `_laid_out` puts them, read from the first to the last.
    """
    step = carray(memory(given), 1, WHOLE)[0]
    hidden, inner, heads, size, eps = step.hidden, step.inner, step.heads, step.size, step.eps
    each, turned = (heads + 2 * step.kv_heads) * size, heads + step.kv_heads
    given_x, weights = carray(memory(step.x), MANY, np.float32), carray(memory(step.weights), MANY, np.float32)
    logits, places = carray(memory(step.logits), MANY, np.float32), carray(memory(step.places), MANY, np.int64)
    about, space, most = about_rows(step), work_space(step), step.together
    x, normed = np.empty(most * hidden, np.float32), np.empty(most * hidden, np.float32)
    qkv, found = np.empty(most * each, np.float32), np.empty(most * heads * size, np.float32)
    gate, up = np.empty(most * inner, np.float32), np.empty(most * inner, np.float32)
    first = taken(given) * most
    # For a number that is written into a call numba compiles what is called once more.
    zero, new, added = np.int64(0), np.bool_(first < 0), np.bool_(first >= 0)
    while first < step.rows:
        count, at = min(most, step.rows - first), zero
        for c in range(count * hidden):
            x[c] = given_x[first * hidden + c]
        for layer in range(step.layers):
            at = normalize_rows(x, count, hidden, weights, at, eps, normed)
            at = multiply(normed, count, hidden, weights, at, each, qkv, zero, new)
            if step.head_norms:
                for row in range(count):
                    for head in range(turned):
                        place = row * each + head * size
                        normalize(qkv, place, size, weights, at + (size if head >= heads else 0), eps, qkv, place)
                at += 2 * size
            keys = carray(memory(places[4 * layer]), MANY, np.float32)
            values = carray(memory(places[4 * layer + 1]), MANY, np.float32)
            prompt_keys = carray(memory(places[4 * layer + 2]), MANY, np.float32)
            prompt_values = carray(memory(places[4 * layer + 3]), MANY, np.float32)
            kept = keys, values, prompt_keys, prompt_values
            for row in range(count):
                attend(step, first + row, kept, about, qkv, row * each, found, row * heads * size, space)
            at = multiply(found, count, heads * size, weights, at, hidden, x, zero, added)
            at = normalize_rows(x, count, hidden, weights, at, eps, normed)
            at = multiply(normed, count, hidden, weights, at, inner, gate, zero, new)
            at = multiply(normed, count, hidden, weights, at, inner, up, zero, new)
            activate(gate, up, count * inner, step.gelu)
            at = multiply(gate, count, inner, weights, at, hidden, x, zero, added)
        at = normalize_rows(x, count, hidden, weights, at, eps, normed)
        multiply(normed, count, hidden, weights, at, step.vocab, logits, first * step.vocab, new)
        first = taken(given) * most


def serves(layers: Sequence[Any], norm: Any, activation: str) -> bool:
    """Whether the loop knows this activation, and all norms have the same epsilon."""
    norms = [n for one in layers for n in (one.before, one.between, *(one.head_norms or ()))]
    return activation in ("silu", "gelu_pytorch_tanh") and {one.eps for one in norms} == {norm.eps}


class WholeStep:
    """Logits after a decode step's tokens of a model that it `serves`."""

    def __init__(self, layers: Sequence[Any], norm: Any, head: Any, activation: str, **sizes: float) -> None:
        """layers: of `decoder.Layer`; sizes: heads, kv_heads, size, scaling."""
        (hidden,), inner = norm.weight.shape, len(layers[0].gate.plain()[0])
        self._vocab, self._like = len(head.plain()[0]), torch.empty(1, int(sizes["kv_heads"]), 1, int(sizes["size"]))
        shape = {"layers": len(layers), "hidden": hidden, "inner": inner, "vocab": self._vocab}
        kinds = {"head_norms": layers[0].head_norms is not None, "gelu": activation != "silu", "eps": norm.eps}
        self._fields = {"weights": _laid_out(layers, norm, head), **shape, **kinds, **sizes}

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, cache: SlotCache) -> Tensor:
        """[B, V] from embeddings x [B, hidden]; cos, sin [B, 1, D]."""
        kept = [memory_of(cache, layer, self._like) for layer in range(self._fields["layers"])]
        places = torch.tensor([[one.data_ptr() for one in each] for each in kept])
        logits, threads = torch.empty(len(x), self._vocab), torch.get_num_threads()
        share = -(-len(x) // threads)
        together = min(_MOST_TOGETHER, share + -share % MOST_HEADS)
        of_step = {"x": x.contiguous(), "logits": logits, "places": places, "together": together}
        Task(WHOLE, **self._fields, **of_step, **fields_of_rows(cache, cos, sin)).run(whole_step, x.dtype, threads)
        return logits


def _laid_out(layers: Sequence[Any], norm: Any, head: Any) -> Tensor:
    """All weights, one behind the other."""
    found: list[Tensor] = []
    for one in layers:
        heads = [norm.weight for norm in one.head_norms or ()]
        found += [one.before.weight, *_panels(one.qkv), *heads, *_panels(one.out)]
        found += [one.between.weight, *(part for each in (one.gate, one.up, one.down) for part in _panels(each))]
    return torch.cat([part.flatten() for part in (*found, norm.weight, *_panels(head))])


def _panels(product: Any) -> tuple[Tensor, Tensor]:
    """A product's weight in panels [_, in, PANEL] and its bias, both filled up with zeros."""
    weight, bias = product.plain()
    missing = -len(weight) % PANEL
    panels = F.pad(weight, (0, 0, 0, missing)).unflatten(0, (-1, PANEL)).mT
    return panels, F.pad(weight.new_zeros(len(weight)) if bias is None else bias, (0, missing))
