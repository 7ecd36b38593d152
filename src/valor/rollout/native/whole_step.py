"""A whole decode step of a small Llama or Qwen2 on CPUs in one compiled loop over the rows, embeddings to logits.

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

from valor.rollout.native.compiled import ABOUT, MANY, SIZES, Task, about_rows, buffers_of, kind, row_fields
from valor.rollout.native.kv_cache import SlotCache
from valor.rollout.native.loops import PANEL, attend, multiply, normalize_rows, silu_times, work_space
from valor.rollout.native.vectors import MOST_HEADS, memory, take_next

# `together` rows go through all layers; buffers [layers, 4] are the addresses of each layer's keys and values.
_WHOLE = ("layers", "hidden", "inner", "vocab", "together", "x", "weights", "buffers", "logits")
WHOLE = kind((*SIZES, *ABOUT, *_WHOLE), ("scaling", "eps"))
_MOST_TOGETHER = 48  # rows: with more, what lies between two layers leaves the nearest cache


def whole_step(task: Any) -> None:
    """logits [B, vocab] from the embeddings x [B, hidden] of the new tokens. task: address of a WHOLE.

    A thread takes `together` rows through all layers: rows need nothing from each other, so no thread ever waits.
    weights: as `_concatenated` orders them, read from the first to the last.
    """
    step = carray(memory(task), 1, WHOLE)[0]
    hidden, inner, heads, size, eps = step.hidden, step.inner, step.heads, step.size, step.eps
    each, most = (heads + 2 * step.kv_heads) * size, step.together
    embedded, weights = carray(memory(step.x), MANY, np.float32), carray(memory(step.weights), MANY, np.float32)
    logits, buffers = carray(memory(step.logits), MANY, np.float32), carray(memory(step.buffers), MANY, np.int64)
    about, space = about_rows(step), work_space(step)
    x, normed = np.empty(most * hidden, np.float32), np.empty(most * hidden, np.float32)
    qkv, attended = np.empty(most * each, np.float32), np.empty(most * heads * size, np.float32)
    gate, up = np.empty(most * inner, np.float32), np.empty(most * inner, np.float32)
    first = take_next(task) * most
    # A literal argument would make numba compile the function once more.
    zero, new, added = np.int64(0), np.bool_(first < 0), np.bool_(first >= 0)
    while first < step.rows:
        count, at = min(most, step.rows - first), zero
        for c in range(count * hidden):
            x[c] = embedded[first * hidden + c]
        for layer in range(step.layers):
            at = normalize_rows(x, count, hidden, weights, at, eps, normed)
            at = multiply(normed, count, hidden, weights, at, each, qkv, zero, new)
            keys = carray(memory(buffers[4 * layer]), MANY, np.float32)
            values = carray(memory(buffers[4 * layer + 1]), MANY, np.float32)
            prompt_keys = carray(memory(buffers[4 * layer + 2]), MANY, np.float32)
            prompt_values = carray(memory(buffers[4 * layer + 3]), MANY, np.float32)
            of_layer = keys, values, prompt_keys, prompt_values
            for row in range(count):
                attend(step, first + row, of_layer, about, qkv, row * each, attended, row * heads * size, space)
            at = multiply(attended, count, heads * size, weights, at, hidden, x, zero, added)
            at = normalize_rows(x, count, hidden, weights, at, eps, normed)
            at = multiply(normed, count, hidden, weights, at, inner, gate, zero, new)
            at = multiply(normed, count, hidden, weights, at, inner, up, zero, new)
            silu_times(gate, up, count * inner)
            at = multiply(gate, count, inner, weights, at, hidden, x, zero, added)
        at = normalize_rows(x, count, hidden, weights, at, eps, normed)
        multiply(normed, count, hidden, weights, at, step.vocab, logits, first * step.vocab, new)
        first = take_next(task) * most


def supported(layers: Sequence[Any], norm: Any, activation: str) -> bool:
    """Whether the loop computes such layers: silu, no norms of heads, one epsilon."""
    epsilons = {norm.eps, *(n.eps for layer in layers for n in (layer.before, layer.between))}
    return activation == "silu" and len(epsilons) == 1 and layers[0].head_norms is None


class WholeStep:
    """Logits after a decode step's tokens of a `supported` model."""

    def __init__(self, layers: Sequence[Any], norm: Any, head: Any, **sizes: float) -> None:
        """layers: of `decoder.Layer`; sizes: heads, kv_heads, size, scaling."""
        (hidden,), inner = norm.weight.shape, len(layers[0].gate.plain()[0])
        self._vocab, self._like = len(head.plain()[0]), torch.empty(1, int(sizes["kv_heads"]), 1, int(sizes["size"]))
        shape = {"layers": len(layers), "hidden": hidden, "inner": inner, "vocab": self._vocab, "eps": norm.eps}
        self._fields = {"weights": _concatenated(layers, norm, head), **shape, **sizes}

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, cache: SlotCache) -> Tensor:
        """[B, V] from embeddings x [B, hidden]; cos, sin [B, 1, D]."""
        layers = [buffers_of(cache, layer, self._like) for layer in range(self._fields["layers"])]
        buffers = torch.tensor([[buffer.data_ptr() for buffer in layer] for layer in layers])
        logits, threads = torch.empty(len(x), self._vocab), torch.get_num_threads()
        share = -(-len(x) // threads)
        together = min(_MOST_TOGETHER, share + -share % MOST_HEADS)
        of_step = {"x": x.contiguous(), "logits": logits, "buffers": buffers, "together": together}
        Task(WHOLE, **self._fields, **of_step, **row_fields(cache, cos, sin)).run(whole_step, x.dtype, threads)
        return logits


def _concatenated(layers: Sequence[Any], norm: Any, head: Any) -> Tensor:
    parts: list[Tensor] = []
    for layer in layers:
        parts += [layer.before.weight, *_panels(layer.qkv), *_panels(layer.out), layer.between.weight]
        parts += [part for product in (layer.gate, layer.up, layer.down) for part in _panels(product)]
    return torch.cat([part.flatten() for part in (*parts, norm.weight, *_panels(head))])


def _panels(product: Any) -> tuple[Tensor, Tensor]:
    """A product's weight in panels [_, in, PANEL] and its bias, both padded with zeros."""
    weight, bias = product.plain()
    missing = -len(weight) % PANEL
    panels = F.pad(weight, (0, 0, 0, missing)).unflatten(0, (-1, PANEL)).mT
    return panels, F.pad(weight.new_zeros(len(weight)) if bias is None else bias, (0, missing))
