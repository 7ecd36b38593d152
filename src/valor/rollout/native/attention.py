"""Attention by which a transformers model decodes rows of different lengths from one `SlotCache`.

Registered with transformers as `valor_slots`: a mask function, which gets every mask rule of the model (causal, sliding
window, chunked) as an index function, and an attention function, which never repeats keys and values for query heads.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from valor.errors import UserError
from valor.models.packing import configs_of, obstacle
from valor.rollout.native.kv_cache import PromptCache, SlotCache

IMPLEMENTATION = "valor_slots"

logger = logging.getLogger(__name__)

# The cache that the present model call fills (prefill) or extends (decode step).
_serving: ContextVar[PromptCache | SlotCache] = ContextVar("valor_serving_cache")


@contextmanager
def serving(cache: PromptCache | SlotCache) -> Iterator[None]:
    """Model calls inside are a prefill into a `PromptCache`, or decode steps over a `SlotCache`."""
    token = _serving.set(cache)
    try:
        yield
    finally:
        _serving.reset(token)


@contextmanager
def generation_mode(hf: nn.Module, *, slots: bool = True) -> Iterator[None]:
    """Dropout and checkpointing are off, and the model's attention is this file's if `slots`; undone at exit."""
    previous = [(config, config._attn_implementation) for config in configs_of(hf)] if slots else []
    training = [module for module in hf.modules() if module.training]
    for config, _ in previous:
        config._attn_implementation = IMPLEMENTATION
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for config, name in previous:
            config._attn_implementation = name
        for module in training:
            module.training = True


def has_slots(hf: nn.Module) -> bool:
    """Whether `hf` decodes from a `SlotCache`: its state is keys and values, and its attention can be this file's."""
    reason = obstacle(hf)
    if reason is not None:
        logger.warning("%s generates by its own cache, prompts of one length at a time: %s", type(hf).__name__, reason)
    return reason is None


def slot_mask(
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Any],
    device: torch.device,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: object,
) -> Tensor | None:
    """Additive float32 mask, None where plain causal attention needs none. Decoding: [B, 1, 1, kv_length] over the
    columns of `SlotCache`; prefill: [1, 1, q_length, kv_length]."""
    cache = _serving.get()
    if use_vmap:
        raise UserError("this model's attention mask is not index-based; the native rollout engine cannot drive it")
    plain = mask_function is causal_mask_function or (local_size is not None and kv_length <= local_size)
    if plain and (isinstance(cache, PromptCache) or cache.even):
        return None
    columns = torch.arange(kv_length, device=device)[None, None, None, :]
    if isinstance(cache, PromptCache):
        batch = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
        queries = torch.arange(q_length, device=device)[None, None, :, None]
    else:
        batch = torch.arange(cache.positions.shape[0], device=device)[:, None, None, None]
        queries = cache.positions[:, None, None, None]
    visible = columns <= queries if plain else mask_function(batch, 0, queries, columns)
    return torch.zeros(visible.shape, device=device).masked_fill_(~visible, float("-inf"))


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention output [B, q, heads, value size] for query [B, heads, q, D], key and value [B, kv heads, L, D].

    `softcap` bounds scores to (-softcap, softcap) by tanh (Gemma 2); `s_aux` [heads] are attention sinks (gpt-oss).
    """
    if position_bias is not None:
        raise UserError(f"{type(module).__name__} adds a position bias; the native rollout engine cannot drive it")
    scores = ScoreRule(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    cache = _serving.get()
    if isinstance(cache, SlotCache):
        return decode_attention(query, key, value, attention_mask, scores), None
    return prefill_attention(query, key, value, attention_mask, scores), None


class ScoreRule(NamedTuple):
    """How products of queries and keys become attention weights."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None  # [heads]

    def weights(self, products: Tensor, mask: Tensor | None) -> Tensor:
        """Weights over the last dimension of float32 `products` [B, kv heads, g, X], which are overwritten."""
        scaling = self.scaling
        if self.softcap is not None:
            products = products.mul_(scaling / self.softcap).tanh_().mul_(self.softcap)
            scaling = 1.0
        products = products.mul_(scaling) if mask is None else torch.add(mask, products, alpha=scaling)
        if self.sinks is None:
            return torch.softmax(products, dim=-1)
        kv_heads, rows = products.shape[1:3]
        # Rows are heads (decode), or heads times positions (prefill): each head's sink stands beside all of its rows.
        sinks = self.sinks.float().view(kv_heads, -1).repeat_interleave(rows * kv_heads // self.sinks.shape[0], dim=1)
        sinks = sinks[None, :, :, None].expand(products.shape[0], -1, -1, -1)
        return torch.softmax(torch.cat([products, sinks], dim=-1), dim=-1)[..., :-1]


def prefill_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: ScoreRule) -> Tensor:
    """Causal attention among the tokens of each prompt."""
    gqa = query.shape[1] != key.shape[1]
    if rule.softcap is None and rule.sinks is None:
        mask = None if mask is None else mask.to(query.dtype)
        out = F.scaled_dot_product_attention(
            query, key, value, mask, scale=rule.scaling, is_causal=mask is None, enable_gqa=gqa
        )
        return out.transpose(1, 2).contiguous()
    batch, heads, length, size = query.shape
    if mask is None:
        mask = torch.full((length, length), float("-inf"), device=query.device).triu_(1)
    grouped = query.reshape(batch, key.shape[1], -1, size)
    mask = mask.expand(1, 1, length, length).repeat(1, 1, heads // key.shape[1], 1)
    weights = rule.weights((grouped @ key.transpose(2, 3)).float(), mask).to(value.dtype)
    return (weights @ value).view(batch, heads, length, -1).transpose(1, 2).contiguous()


def decode_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: ScoreRule) -> Tensor:
    """Attention of one new token per row over its columns: [B, 1, heads, value size].

    The heads that share a key-value head are query rows of one product. Scores, mask and softmax are float32.
    """
    batch, heads, _, size = query.shape
    query = query.reshape(batch, key.shape[1], -1, size)
    weights = rule.weights(_products(key, query).float(), mask).to(value.dtype)
    return (weights @ value).reshape(batch, 1, heads, -1)


def _products(keys: Tensor, queries: Tensor) -> Tensor:
    """keys [b, h, L, D], queries [b, h, g, D] -> [b, h, g, L], in float32 but for bfloat16 on a CPU, which has no such
    product; with keys on the left, which the CPU libraries multiply 1.5-3 times faster for few queries."""
    if keys.dtype is torch.float32:
        return queries @ keys.transpose(2, 3)
    if keys.device.type == "cpu":
        return (keys @ queries.transpose(2, 3)).transpose(2, 3)
    flat = torch.bmm(keys.flatten(0, 1), queries.transpose(2, 3).flatten(0, 1), out_dtype=torch.float32)
    return flat.unflatten(0, keys.shape[:2]).transpose(2, 3)


AttentionInterface.register(IMPLEMENTATION, slot_attention)
AttentionMaskInterface.register(IMPLEMENTATION, slot_mask)
