"""Causal attention over packed rows: every token attends to its own row alone, however many rows lie in one.

Shapes: N positions, D head size; n queries and m keys of a row.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from valor.models.internals import takes_enable_gqa
from valor.models.linear import computing_dtype

_SHORT = 2**13  # queries times keys of a row up to which a CPU is faster with `_Products`
_PADDING = 2**14  # queries times keys that cost a CPU less than one more call
_SINK_SIZE = 8  # further numbers of a head for its sink: kernels take multiples of 8
VARLEN_DEVICES = ("cuda",)  # types of devices on which torch may have variable-length attention

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Segments:
    """Row i lies at positions bounds[i] to bounds[i + 1] - 1. `group`: the ranks that divide the positions.

    With shared prefixes, bounds cover each row's new tokens, and `keys` index all of its tokens, row after row, with
    `key_bounds` as `bounds`. Tensors are on the model's device, copied there once a pass. They are fields, since FSDP
    passes copies of dataclasses on, field by field.
    """

    bounds: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    offsets: Tensor | None = field(default=None, compare=False)  # bounds, int32
    key_bounds: tuple[int, ...] | None = None
    key_offsets: Tensor | None = field(default=None, compare=False)
    keys: Tensor | None = field(default=None, compare=False)  # int64

    @staticmethod
    def of(lengths: list[int], device: torch.device | None = None) -> Segments:
        """Rows of these lengths."""
        bounds = (0, *accumulate(lengths))
        return Segments(bounds, offsets=torch.tensor(bounds, dtype=torch.int32, device=device))

    def reading(self, lengths: list[int], keys: Tensor) -> Segments:
        """The same with shared prefixes: rows of these lengths, whose tokens are at `keys`."""
        bounds = (0, *accumulate(lengths))
        offsets = torch.tensor(bounds, dtype=torch.int32, device=keys.device)
        return replace(self, key_bounds=bounds, key_offsets=offsets, keys=keys)

    def shared_out(self, group: dist.ProcessGroup | None, padding: int) -> Segments:
        """The same divided over the ranks of a group, with a last row of padding, if any."""
        if not padding:
            return replace(self, group=group)
        assert self.offsets is not None
        padded = replace(Segments.of([*self.lengths, padding], self.offsets.device), group=group)
        if self.keys is None or self.key_bounds is None:
            return padded
        more = torch.arange(self.bounds[-1], self.bounds[-1] + padding, device=self.keys.device)
        return padded.reading([*_lengths(self.key_bounds), padding], torch.cat([self.keys, more]))

    def to(self, device: torch.device) -> Segments:
        """The same with its tensors on `device`."""
        return replace(self, **{name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)})

    def in_chunks(self, size: int) -> Segments:
        """The same with each row cut where the number of a token in its row is a multiple of `size`."""
        assert self.offsets is not None
        bounds, key_bounds = [0], [0]
        for (_, end), (first, last) in zip(
            pairwise(self.bounds), pairwise(self.key_bounds or self.bounds), strict=True
        ):
            cuts = [*range(first + size, last, size), last]
            key_bounds += cuts
            bounds += [max(bounds[-1], end - (last - cut)) for cut in cuts]
        cut = replace(Segments.of(_lengths(tuple(bounds)), self.offsets.device), group=self.group)
        return cut if self.keys is None else cut.reading(_lengths(tuple(key_bounds)), self.keys)

    @property
    def lengths(self) -> list[int]:
        return _lengths(self.bounds)


class Rule(NamedTuple):
    """How products of queries and keys become weights. `window`: the tokens that one sees, itself included; None: all
    before it. `sinks` [heads]: logits beside a row's, whose weights are of no value (gpt-oss)."""

    scaling: float | None = None  # None: D ** -0.5
    window: int | None = None
    sinks: Tensor | None = None

    def visible(self, n: int, m: int, device: torch.device) -> Tensor:
        """[n, m] bool: query t sees keys to m - n + t."""
        visible = torch.ones(n, m, dtype=torch.bool, device=device).tril_(m - n)
        return visible if self.window is None else visible.triu_(m - n - self.window + 1)


def _lengths(bounds: tuple[int, ...]) -> list[int]:
    return [end - start for start, end in pairwise(bounds)]


def attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: Rule) -> Tensor:
    """Output [1, N, heads, value size] for query [1, heads, N, D], key and value [1, kv heads, N, D]."""
    shape = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    varlen = rule.sinks is None and query.device.type in VARLEN_DEVICES
    if varlen and _varlen_agrees(query.device, query.dtype, *shape):
        return _varlen(query, key, value, segments, rule)[None]
    return _in_batches(query, key, value, segments, rule)[None]


def _in_batches(query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: Rule) -> Tensor:
    """Attention output [N, heads, value size] of query [N, heads, D] over key and value [N, kv heads, D]."""
    batches = _batches(segments.bounds, segments.key_bounds or segments.bounds, query.device)
    at = batches.keys if segments.keys is None else segments.keys[batches.keys]
    queries = query.index_select(0, batches.queries).split([b * n for b, n, _ in batches.shapes])
    keys, values = (x.index_select(0, at).split([b * m for b, _, m in batches.shapes]) for x in (key, value))
    outputs = []
    for (b, _, _), *parts in zip(batches.shapes, queries, keys, values, strict=True):
        q, k, v = (x.unflatten(0, (b, -1)).transpose(1, 2) for x in parts)
        outputs.append(attend(q, k, v, rule).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, batches.places)


class _Batches(NamedTuple):
    """Rows side by side, padded at their ends; batch after batch."""

    shapes: list[tuple[int, int, int]]  # rows, queries and keys of each
    queries: Tensor  # positions of the queries
    keys: Tensor  # of the keys, in the list of all rows' tokens
    places: Tensor  # where among the queries each position stands


@lru_cache(maxsize=8)
def _batches(bounds: tuple[int, ...], key_bounds: tuple[int, ...], device: torch.device) -> _Batches:
    """Batches rows of equal prefix length; right padding is causally invisible. A row joins a batch as long as its
    padding costs less than one more call."""
    rows = zip(_lengths(bounds), _lengths(key_bounds), bounds, key_bounds, strict=False)
    ordered = sorted((row for row in rows if row[0]), key=lambda row: (row[1] - row[0], row[0]))
    batches: list[list[tuple[int, int, int, int]]] = []
    for row in ordered:
        last = batches[-1] if batches else [row]
        (n, m, *_), (n_last, m_last, *_) = row, last[-1]
        joins = m - n == m_last - n_last and len(last) * (n * m - n_last * m_last) <= _PADDING
        if joins and batches:
            last.append(row)
        else:
            batches.append([row])
    shapes, queries, keys, taken = [], [], [], 0
    places = torch.empty(bounds[-1], dtype=torch.long)
    for batch in batches:
        longest, seen = batch[-1][:2]
        shapes.append((len(batch), longest, seen))
        for n, m, start, key_start in batch:
            queries.append(torch.arange(start, start + longest).clamp_(max=start + n - 1))
            keys.append(torch.arange(key_start, key_start + seen).clamp_(max=key_start + m - 1))
            places[start : start + n] = torch.arange(taken, taken + n)
            taken += longest
    return _Batches(shapes, torch.cat(queries).to(device), torch.cat(keys).to(device), places.to(device))


def attend(q: Tensor, k: Tensor, v: Tensor, rule: Rule, visible: Tensor | None = None) -> Tensor:
    """[b, heads, n, value size] of q [b, heads, n, D], k and v [b, kv heads, m, D]. `visible`, [b or 1, 1, n, m] bool:
    in place of the rule's."""
    n, m, scale = q.shape[2], k.shape[2], rule.scaling or q.shape[-1] ** -0.5
    short = q.device.type == "cpu" and n * m <= _SHORT and visible is None
    causal = n == m and rule.sinks is None and (rule.window is None or rule.window >= m)
    if visible is None and (short or not causal):
        visible = rule.visible(n, m, q.device)
    if rule.sinks is not None:
        q, k, v, visible = _with_sinks(q, k, v, visible, rule.sinks / scale)
    if short:
        return _Products.apply(q, k, v, scale, visible)
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.device.type != "cpu":  # CUDA's kernels take no mask, and no float32, with fewer key heads
        k, v = (x[:, :, None].expand(-1, -1, q.shape[1] // k.shape[1], -1, -1).flatten(1, 2) for x in (k, v))
        grouped = False
    return nn.functional.scaled_dot_product_attention(
        q, k, v, visible, is_causal=visible is None, scale=scale, enable_gqa=grouped
    )


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, visible: Any, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with a first key, visible to all, whose product with the queries of each head is one of `sinks` [heads],
    and whose value is zero."""
    further = nn.functional.pad(sinks.to(q.dtype)[:, None, None], (0, _SINK_SIZE - 1))
    q = torch.cat([q, further.expand(*q.shape[:3], -1)], dim=-1)
    k = nn.functional.pad(k, (0, _SINK_SIZE, 1, 0))
    k[:, :, 0, -_SINK_SIZE] = 1
    return q, k, nn.functional.pad(v, (0, 0, 1, 0)), nn.functional.pad(visible, (1, 0), value=True)


class _Products(torch.autograd.Function):
    """The same as two batched products and a float32 softmax whose weights are saved: on CPUs faster for short rows,
    above all backward. The query heads of a key head are further queries of it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> Tensor:
        grouped = q.unflatten(1, (k.shape[1], -1))
        keys, values = k.flatten(0, 1), v.flatten(0, 1)
        queries = grouped.reshape(len(keys), -1, q.shape[-1])
        scores = _bmm(queries, keys.transpose(1, 2)).float().mul_(scale)
        scores.unflatten(1, (-1, q.shape[2])).masked_fill_(~visible, -torch.inf)
        weights = torch.softmax(scores, -1).to(q.dtype)
        out = _bmm(weights, values).to(q.dtype)
        ctx.save_for_backward(keys, values, queries, weights, out)
        ctx.scale, ctx.shapes = scale, (q.shape, k.shape, v.shape)
        return out.view(*grouped.shape[:4], -1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        keys, values, queries, weights, out = ctx.saved_tensors
        grad = grads[0].reshape(out.shape)
        # d score = weight * (d weight - sum of weight * d weight), and that sum is the product of grad and output
        inner = torch.linalg.vecdot(grad.float(), out.float())[..., None]
        scores = _bmm(grad, values.transpose(1, 2)).float().sub_(inner).mul_(weights).mul_(ctx.scale).to(grad.dtype)
        gradients = (
            _bmm(scores, keys),
            _bmm(scores.transpose(1, 2), queries),
            _bmm(weights.transpose(1, 2), grad),
        )
        return (*(x.to(keys.dtype).view(shape) for x, shape in zip(gradients, ctx.shapes, strict=True)), None, None)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """The batched product, float32 where that is faster than the numbers' own dtype."""
    dtype = computing_dtype(a)
    return torch.bmm(a.to(dtype), b.to(dtype))


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: Rule) -> Tensor:
    """The same by torch's variable-length flash attention (CUDA, half precision)."""
    from torch.nn.attention.varlen import varlen_attn  # newer torch

    offsets: Any = segments.offsets
    key_offsets: Any = offsets if segments.key_offsets is None else segments.key_offsets
    longest = max(segments.lengths), max(_lengths(segments.key_bounds or segments.bounds))
    options: dict[str, Any] = {
        "scale": rule.scaling,
        "window_size": (-1 if rule.window is None else rule.window - 1, 0),
    }
    if takes_enable_gqa(varlen_attn):
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    if segments.keys is not None:
        key, value = key.index_select(0, segments.keys), value.index_select(0, segments.keys)
    tensors = (x.contiguous() for x in (query, key, value))
    return varlen_attn(*tensors, offsets, key_offsets, *longest, **options)  # type: ignore[return-value]


@lru_cache
def _varlen_agrees(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int, value_size: int
) -> bool:
    """Whether variable-length attention is there for such tensors and gives, forward and backward, what sdpa does.

    To be asked for the first time outside of checkpointed layers, which would take the probe for a part of them: the
    engine makes a pass when it is built.
    """
    if dtype not in (torch.bfloat16, torch.float16) or size != value_size:
        return False
    generator = torch.Generator().manual_seed(0)
    keys = torch.tensor([*range(5), 0, 1, 2, 5, *range(6, 15)], device=device)  # row 1 begins with 3 tokens of row 0
    segments = Segments.of([5, 1, 9], device).reading([5, 4, 9], keys)

    def random(length: int, count: int) -> Tensor:
        return torch.randn(length, count, size, generator=generator).to(device, dtype).requires_grad_()

    inputs = random(15, heads), random(15, kv_heads), random(15, kv_heads)
    try:
        with torch.enable_grad():
            pairs: list[Any] = []
            for rule in (Rule(), Rule(window=3)):
                outputs = _varlen(*inputs, segments, rule), _in_batches(*inputs, segments, rule)
                pairs.append(outputs)
                pairs += zip(*(torch.autograd.grad(out.float().sum(), inputs) for out in outputs), strict=True)
        agrees = all(torch.allclose(a.float(), b.float(), rtol=3e-2, atol=3e-2) for a, b in pairs)
        reason = "gives other numbers"
    except (ImportError, NotImplementedError, RuntimeError, TypeError) as error:
        agrees, reason = False, str(error).partition("\n")[0]
    if not agrees:
        logger.warning("variable-length attention is not used, rows attend one after another: it %s", reason)
    return agrees
