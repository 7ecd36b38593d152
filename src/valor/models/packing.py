"""Rows one behind the other in one long row, without padding: every token attends to its own row alone.

Registered with transformers under the name `valor_packed`: an attention function that is told where rows begin, and a
mask maker that then makes no mask. Without packed rows both are transformers' own `sdpa`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from valor.models.sequence_parallel import heads_to_positions, positions_to_heads

IMPLEMENTATION = "valor_packed"
VARLEN_DEVICES = ("cuda",)  # types of devices on which torch may have variable-length attention
_REPLACED = ("sdpa", "flash_attention_2", IMPLEMENTATION)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Segments:
    """Where rows lie: row i at positions bounds[i] to bounds[i + 1] - 1. `group`: whose ranks share the positions.

    `offsets` are the bounds as int32 on the device of the model, copied there once and not in every layer. It is a
    field, since FSDP passes copies of dataclasses on, field by field.
    """

    bounds: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    offsets: Tensor | None = field(default=None, compare=False)

    @staticmethod
    def of(lengths: list[int], group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> Segments:
        """Rows of these lengths."""
        bounds = (0, *accumulate(lengths))
        return Segments(bounds, group, torch.tensor(bounds, dtype=torch.int32, device=device))

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in pairwise(self.bounds)]


_packing: ContextVar[bool] = ContextVar("valor_packing", default=False)


@contextmanager
def packing(segments: Segments | None) -> Iterator[None]:
    """Model calls inside read packed rows, if there are `segments`."""
    token = _packing.set(segments is not None)
    try:
        yield
    finally:
        _packing.reset(token)


def packed_mask(*, local_size: int | None = None, **rest: Any) -> Tensor | None:
    """No mask for packed rows. ValueError: the model has a sliding window, which a row may be longer than."""
    if not _packing.get():
        return sdpa_mask(local_size=local_size, **rest)
    if local_size is not None:
        raise ValueError("it has a sliding window")
    return None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    segments: Segments | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention output [1, N, heads, value size] for query [1, heads, N, D], key and value [1, kv heads, N, D].

    N is this rank's share of the positions where the segments have a group.
    """
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **rest)
    group = segments.group
    if group is None:
        return _attention(module, query, key, value, segments, **rest), None
    if key.shape[1] % group.size():
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    query, key, value = (positions_to_heads(x, group) for x in (query, key, value))
    out = _attention(module, query, key, value, segments, **rest)
    return heads_to_positions(out.transpose(1, 2), group).transpose(1, 2), None


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, segments: Segments, **rest: Any) -> Tensor:
    scaling = rest.get("scaling")
    shape = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    if query.device.type in VARLEN_DEVICES and _varlen_agrees(query.device, query.dtype, *shape):
        return _varlen(query, key, value, segments, scaling)
    found = []
    for start, count, length in _runs(segments):  # neighbours of one length attend side by side
        rows = slice(start, start + count * length)
        q, k, v = (x[0, :, rows].unflatten(1, (count, length)).transpose(0, 1) for x in (query, key, value))
        found.append(sdpa_attention_forward(module, q, k, v, None, **rest)[0].flatten(0, 1))
    return torch.cat(found)[None]


def _runs(segments: Segments) -> Iterator[tuple[int, int, int]]:
    """Neighbouring rows of the same length as (start, how many, length)."""
    start = 0
    for length, rows in groupby(segments.lengths):
        count = len(list(rows))
        yield start, count, length
        start += count * length


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """The same by torch's variable-length flash attention (CUDA, half precision)."""
    from torch.nn.attention.varlen import varlen_attn  # newer torch

    tensors = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
    longest = max(segments.lengths)
    options = {"scale": scaling, "window_size": (-1, 0), "enable_gqa": query.shape[1] != key.shape[1]}
    offsets: Any = segments.offsets
    return varlen_attn(*tensors, offsets, offsets, longest, longest, **options)[None]  # type: ignore[index]


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
    segments = Segments.of([5, 1, 9], device=device)

    def random(count: int) -> Tensor:
        return torch.randn(1, count, 15, size, generator=generator).to(device, dtype).requires_grad_()

    query, key, value = random(heads), random(kv_heads), random(kv_heads)

    def attend(row: slice) -> Tensor:
        parts = query[:, :, row], key[:, :, row], value[:, :, row]
        out = nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=heads != kv_heads)
        return out.transpose(1, 2)

    try:
        with torch.enable_grad():
            found = _varlen(query, key, value, segments, None)
            expected = torch.cat([attend(slice(start, end)) for start, end in pairwise(segments.bounds)], dim=1)
            pairs, inputs = [(found, expected)], (query, key, value)
            pairs += zip(*(torch.autograd.grad(out.float().sum(), inputs) for out in (found, expected)), strict=True)
        agrees = all(torch.allclose(a.float(), b.float(), rtol=3e-2, atol=3e-2) for a, b in pairs)
        reason = "gives other numbers"
    except (ImportError, NotImplementedError, RuntimeError, TypeError) as error:
        agrees, reason = False, str(error).partition("\n")[0]
    if not agrees:
        logger.warning("variable-length attention is not used, rows attend one after another: it %s", reason)
    return agrees


def enable_packing(hf: Any) -> bool:
    """Make `hf` read packed rows; False, with a warning, where its architecture does not let it.

    Checked on tiny rows: the hidden states must be those of padded rows.
    """
    models = [module for module in hf.modules() if isinstance(module, PreTrainedModel)]
    configs = list({id(model.config): model.config for model in models}.values())
    before = [str(config._attn_implementation) for config in configs]
    reason = _obstacle(models, before)
    if reason is None:
        _set(configs, [IMPLEMENTATION] * len(configs))
        try:
            reason = None if _agrees(hf) else "packed rows give other numbers"
        except (RuntimeError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
    if reason is not None:
        _set(configs, before)
        logger.warning("%s reads padded rows (use_remove_padding has no effect): %s", type(hf).__name__, reason)
    return reason is None


def _obstacle(models: list[PreTrainedModel], implementations: list[str]) -> str | None:
    if not all(name in _REPLACED for name in implementations):
        return f"its attention is {', '.join(sorted(set(implementations)))}, not sdpa"
    if not models or not all(model._supports_attention_backend for model in models):
        return "it does not use the attention interface of transformers"
    kinds = {kind for model in models for kind in getattr(model.config, "layer_types", None) or ()}
    others = sorted(kinds - {"full_attention"})
    return f"it has layers of type {', '.join(others)}" if others else None


def _set(configs: list[Any], names: list[str]) -> None:
    for config, name in zip(configs, names, strict=True):
        config._attn_implementation = name


@torch.no_grad()
def _agrees(hf: Any) -> bool:
    embeddings = hf.get_input_embeddings().weight
    ids = (torch.arange(12, device=embeddings.device).view(2, 6) * 7919 + 13) % len(embeddings)
    padded = hf.base_model(input_ids=ids, use_cache=False).last_hidden_state
    lengths = [6, 4]
    flat = torch.cat([row[:length] for row, length in zip(ids, lengths, strict=True)])[None]
    positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])[None]
    segments = Segments.of(lengths, device=ids.device)
    with packing(segments):
        packed = hf.base_model(input_ids=flat, position_ids=positions, use_cache=False, segments=segments)
    expected = torch.cat([row[:length] for row, length in zip(padded, lengths, strict=True)]).float()
    tolerance = 1e-5 if embeddings.dtype is torch.float32 else 3e-2
    return torch.allclose(packed.last_hidden_state[0].float(), expected, rtol=tolerance, atol=tolerance)


AttentionInterface.register(IMPLEMENTATION, packed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, packed_mask)
