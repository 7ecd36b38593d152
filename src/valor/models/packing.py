"""Packed rows for transformers models: an attention function that knows where rows begin, and a mask function that
says for each kind of layer how far a token sees in its row, registered as `valor_packed`. Without packed rows both are
those of `sdpa`.

Ulysses sequence parallelism (Jacobs et al., 2023): ranks of a group hold parts of the same rows. Outside attention a
rank computes its positions; for attention the group exchanges, so that each rank has all positions of some of the
heads. Every rank computes the loss from all ranks' numbers, and the gradient of its positions: summed over ranks it is
the gradient of the loss.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from valor.models.attention import Rule, Segments, attend, attention
from valor.models.images import IN_BLOCKS
from valor.models.internals import attention_of, has_attention_interface, set_attention

IMPLEMENTATION = "valor_packed"
_REPLACED = ("sdpa", "flash_attention_2", IMPLEMENTATION)
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_TRIED_WINDOW = 4  # tokens, fewer than the rows of `_agrees` have

logger = logging.getLogger(__name__)

_packed: ContextVar[Segments | None] = ContextVar("valor_packed_rows", default=None)  # the rows of a model call


@contextmanager
def packing(segments: Segments | None) -> Iterator[None]:
    """Model calls inside read packed rows, if there are `segments`."""
    token = _packed.set(segments)
    try:
        yield
    finally:
        _packed.reset(token)


def packed_mask(*, local_size: int | None = None, config: Any = None, **rest: Any) -> Tensor | int | Segments | None:
    """For packed rows, what `packed_attention` takes as the mask of layers of one kind: their window, or the segments
    of their chunks; None where a token sees all of its row before it."""
    segments = _packed.get()
    if segments is None:
        return sdpa_mask(local_size=local_size, config=config, **rest)
    if local_size is None or "chunked_attention" not in (getattr(config, "layer_types", None) or ()):
        return local_size
    return segments.in_chunks(local_size)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | int | Segments | None,
    segments: Segments | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention output [1, N, heads, value size] for query [1, heads, N, D], key and value [1, kv heads, N, D].

    N is this rank's share of the positions where the segments have a group. `s_aux` [heads]: sinks. ValueError: scores
    are not plain products.
    """
    if any(rest.get(name) is not None for name in ("softcap", "position_bias")) and (segments or s_aux is not None):
        raise ValueError("its attention scores have a soft cap or a bias")
    rule = Rule(rest.get("scaling"), attention_mask if isinstance(attention_mask, int) else None, s_aux)
    if segments is None:
        assert not isinstance(attention_mask, int | Segments)
        if s_aux is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **rest)
        return attend(query, key, value, rule, attention_mask).transpose(1, 2).contiguous(), None
    if isinstance(attention_mask, Segments):
        segments = attention_mask
    if (group := segments.group) is None:
        return attention(query, key, value, segments, rule), None
    if key.shape[1] % group.size():
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    query, key, value = (_Exchange.apply(x, group, False) for x in (query, key, value))
    if s_aux is not None:
        rule = rule._replace(sinks=s_aux.chunk(group.size())[group.rank()])
    out = attention(query, key, value, segments, rule)
    return _Exchange.apply(out.transpose(1, 2), group, True).transpose(1, 2), None


class _Exchange(torch.autograd.Function):
    """[1, H / s, N, D], all positions of this rank's heads, to [1, H, N / s, D], all heads of its positions (of s
    ranks); or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_positions: bool) -> Tensor:
        ctx.group, ctx.to_positions, ranks = group, to_positions, group.size()
        _, heads, length, size = x.shape
        if to_positions:  # to each rank its positions, from each rank its heads
            sent = x[0].unflatten(1, (ranks, length // ranks)).transpose(0, 1).contiguous()
        else:
            sent = x[0].unflatten(0, (ranks, heads // ranks)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        if to_positions:
            return received.flatten(0, 1)[None]
        return received.transpose(0, 1).reshape(1, heads // ranks, ranks * length, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(grads[0], ctx.group, not ctx.to_positions), None, None


class PutTogether(torch.autograd.Function):
    """[total, ...] on all ranks from a part [n, ...] of each, which begins at `begin`; a rank has the gradient of its
    part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, begin: int, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.rows = slice(begin, begin + len(part))
        parts = part.new_zeros(total, *part.shape[1:])
        parts[ctx.rows] = part
        if total:
            dist.all_reduce(parts, group=group)
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0][ctx.rows], None, None, None


def enable_packing(hf: Any) -> bool:
    """Make `hf` read packed rows; False, with a warning, where its architecture does not let it.

    Checked on tiny rows, longer than windows that are as tiny: the hidden states must be those of padded rows.
    """
    configs = configs_of(hf)
    before = [attention_of(config) for config in configs]
    reason = obstacle(hf)
    replaced = (*_REPLACED, *["eager"] * (not getattr(hf, "_supports_sdpa", True)))  # those with sinks have no sdpa
    if any(config.model_type in IN_BLOCKS for config in configs):
        reason = "tokens of an image attend to later ones"
    if any(getattr(config, "attn_temperature_tuning", None) for config in configs):
        reason = "it scales queries by their place in all that it reads (attn_temperature_tuning)"
    if not all(name in replaced for name in before):
        reason = f"its attention is {', '.join(sorted(set(before)))}, not sdpa"
    if reason is None:
        for config, name in zip(configs, before, strict=True):
            set_attention(config, name if name == "eager" else IMPLEMENTATION)
        try:
            with _tiny_windows(configs):
                reason = None if _agrees(hf, configs) else "packed rows give other numbers"
        except (RuntimeError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
    if reason is not None:
        for config, name in zip(configs, before, strict=True):
            set_attention(config, name)
        logger.warning("%s reads padded rows (use_remove_padding has no effect): %s", type(hf).__name__, reason)
    return reason is None


def configs_of(hf: nn.Module) -> list[Any]:
    """The configs of the transformers models in `hf`."""
    return list({id(m.config): m.config for m in hf.modules() if isinstance(m, PreTrainedModel)}.values())


def obstacle(hf: nn.Module) -> str | None:
    """Why `hf` cannot have an attention function of ours; None: it can."""
    models = [module for module in hf.modules() if isinstance(module, PreTrainedModel)]
    if not models or not all(map(has_attention_interface, models)):
        return "it does not use the attention interface of transformers"
    kinds = {kind for model in models for kind in getattr(model.config, "layer_types", None) or ()}
    others = sorted(kinds - _LAYERS)
    return f"it has layers of type {', '.join(others)}" if others else None


@contextmanager
def _tiny_windows(configs: list[Any]) -> Iterator[None]:
    """Windows and chunks of `_TRIED_WINDOW` tokens; undone at exit."""
    names = ("sliding_window", "attention_chunk_size")
    before = [(config, name, getattr(config, name, None)) for config in configs for name in names]
    before = [setting for setting in before if setting[2] is not None]
    for config, name, _ in before:
        setattr(config, name, _TRIED_WINDOW)
    try:
        yield
    finally:
        for setting in before:
            setattr(*setting)


@torch.no_grad()
def _agrees(hf: Any, configs: list[Any]) -> bool:
    """Whether packed rows have the hidden states of padded ones, which are read by the attention that is set; ours is
    set then."""
    embeddings = hf.get_input_embeddings().weight
    ids = (torch.arange(12, device=embeddings.device).view(2, 6) * 7919 + 13) % len(embeddings)
    ids[1, :3] = ids[0, :3]  # tokens that both rows begin with, read once
    first, second = torch.arange(6, device=ids.device), torch.arange(3, 5, device=ids.device)
    segments = Segments.of([6, 2], ids.device).reading([6, 5], torch.cat([first, first[:3], second + 3]))
    flat, positions = torch.cat([ids[0], ids[1, 3:5]]), torch.cat([first, second])
    padded = hf.base_model(input_ids=ids, use_cache=False)[0]  # logits, where the base is the model itself
    for config in configs:
        set_attention(config, IMPLEMENTATION)
    with packing(segments):
        inputs = {"input_ids": flat[None], "position_ids": positions[None], "segments": segments}
        packed = hf.base_model(**inputs, use_cache=False)[0][0]
    expected = torch.cat([padded[0], padded[1, 3:5]]).float()
    tolerance = 1e-5 if embeddings.dtype is torch.float32 else 0.1  # what goes wrong goes wrong by much more
    return bool((packed.float() - expected).norm() <= tolerance * expected.norm())


AttentionInterface.register(IMPLEMENTATION, packed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, packed_mask)
