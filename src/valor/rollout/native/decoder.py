"""Forward passes of the Llama family driven directly over its weights, for prefill and decoding.

A decode step of a small model is many tiny operations; here projections that read the same input are one product, and
on CPUs attention and norms are compiled loops. Models of `FAMILIES` are driven this way if a trial gives the logits of
their own forward pass (`agrees`); all others use that one, with `packed_linears`.

Few rows are multiplied by every weight, so the time goes into reading weights, which oneDNN does fastest in a blocked
layout of its own. Packing costs one pass over the weights and a second copy of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.masking_utils import causal_mask_function

from valor.models.hf import cache_argument
from valor.models.linear import computing_dtype, is_replaced
from valor.models.lora import low_rank, merged_weight
from valor.rollout.native.attention import ScoreRule, decode_attention, prefill_attention, serving, slot_mask
from valor.rollout.native.kv_cache import MIN_GROWTH, SIMD_WIDTH, PromptCache, SlotCache

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma")  # by `model_type`; SmolLM2 is a llama
_LEAST_PACKED = 2**18  # elements of a float32 weight: with fewer, the 20 µs that oneDNN takes to start cost more
_MOST_WHOLE = 2**22  # elements of a model whose decode step is one loop: more leave the processor's caches
_TYPICAL_ROWS = 64  # for which the layout is chosen; other row counts work as well with it


class Product:
    """x Wᵀ + b of a linear layer, or of several with the same input, concatenated.

    Adapters are summed into a float32 copy of W, and multiplied beside a W of less precision, which would round them.
    """

    def __init__(self, *layers: Any) -> None:
        linear = [getattr(layer, "base_layer", layer) for layer in layers]
        if any(type(one) is not nn.Linear for one in linear):
            raise TypeError("not a plain linear layer")
        biases = [one.bias for one in linear if one.bias is not None]
        if len(biases) not in (0, len(linear)):
            raise TypeError("some have a bias and others have none")
        self.dtype = dtype = computing_dtype(linear[0].weight)
        in_float32 = dtype is torch.float32
        merges = [in_float32 and hasattr(layer, "base_layer") for layer in layers]
        weights = [merged_weight(x) if merges_x else x.weight for x, merges_x in zip(layers, merges, strict=True)]
        weight = (torch.cat(weights) if len(weights) > 1 else weights[0]).to(dtype)
        self._beside = None if in_float32 or linear == [*layers] else _beside(layers, dtype)
        self._bias = torch.cat([bias.to(self.dtype) for bias in biases]) if biases else None
        gains = weight.numel() >= _LEAST_PACKED or self.dtype is torch.bfloat16
        self._packed = _can_pack(weight) and gains
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS)
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            y = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = F.linear(x, self._weight, self._bias)
        return y if self._beside is None else y.addmm_(x @ self._beside[0], self._beside[1])

    def plain(self) -> tuple[Tensor, Tensor | None]:
        """The weight [out, in] and the bias."""
        return self._weight.to_dense() if self._packed else self._weight, self._bias


def _beside(layers: Sequence[Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[in, R] and [R, out]: the adapters of layers with the same input, whose ranks sum to R, as two products."""
    pairs = [low_rank(layer) for layer in layers]
    up = torch.block_diag(*(b for _, b in pairs))
    return torch.cat([a for a, _ in pairs]).t().to(dtype), up.t().to(dtype)


def _can_pack(weight: Tensor) -> bool:
    return _is_on_cpu(weight) and torch.backends.mkldnn.is_available()


def _is_on_cpu(weight: Tensor) -> bool:
    """In a dtype for which there are fast CPU paths."""
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)


@contextmanager
def packed_linears(root: nn.Module) -> Iterator[None]:
    """Every plain `nn.Linear` under `root` computes with a packed copy of its present weight where that is faster."""
    linear = [m for m in root.modules() if type(m) is nn.Linear and not is_replaced(m) and _can_pack(m.weight)]
    before = [vars(layer).get("forward") for layer in linear]
    for layer in linear:
        layer.forward = partial(_in_computing_dtype, Product(layer))  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, forward in zip(linear, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _in_computing_dtype(product: Product, x: Tensor) -> Tensor:
    return product(x.to(product.dtype)).to(x.dtype)


class Norm:
    """Root mean square norm over the last dimension."""

    def __init__(self, layer: Any) -> None:
        weight, self.eps = layer.weight, getattr(layer, "variance_epsilon", None) or layer.eps
        # Gemma's multiplies by 1 + weight. What it does to ones tells.
        plain = torch.allclose(layer(torch.ones_like(weight)).float(), weight.float(), atol=1e-2)
        self.weight = (weight if plain else 1 + weight).to(computing_dtype(weight)).detach()
        self._apply: Any = partial(F.rms_norm, normalized_shape=weight.shape, weight=self.weight, eps=self.eps)
        if _is_on_cpu(self.weight):
            from valor.rollout.native.compiled import CompiledNorm  # numba takes half a second to load

            self._apply = CompiledNorm(self.weight, self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        return self._apply(x)


class Layer:
    """The weights of one decoder layer."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.before, self.between = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        self.qkv = Product(attention.q_proj, attention.k_proj, attention.v_proj)
        per_head = hasattr(attention, "q_norm")
        self.head_norms = (Norm(attention.q_norm), Norm(attention.k_norm)) if per_head else None
        self.out = Product(attention.o_proj)
        self.gate, self.up, self.down = Product(mlp.gate_proj), Product(mlp.up_proj), Product(mlp.down_proj)


class Decoder:
    """The forward pass of `hf` in generation, with its present weights; float32 but for attention where products of the
    model's dtype are slow.

    TypeError, KeyError or AttributeError: it is not of the family, or not in its plain form.
    """

    def __init__(self, hf: Any) -> None:
        base, config = hf.base_model, hf.config.get_text_config()
        masks = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if masks or getattr(config, "sliding_window", None) or config.model_type not in FAMILIES:
            raise TypeError("not a plain model of the Llama family")
        self._embed, self._rotary = base.embed_tokens, base.rotary_emb
        self.angle_table: tuple[Tensor, Tensor] | None = None
        self._layers = [Layer(layer) for layer in base.layers]
        self._norm, self._head = Norm(base.norm), Product(hf.get_output_embeddings())
        self._heads = config.num_attention_heads
        self._kv_heads = getattr(config, "num_key_value_heads", None) or self._heads
        attention = base.layers[0].self_attn
        self._size, self._rule = attention.head_dim, ScoreRule(attention.scaling, None, None)
        activation = getattr(config, "hidden_act", None) or config.hidden_activation
        self._activation = ACT2FN[activation]
        weight = base.embed_tokens.weight
        self._dtype = computing_dtype(weight)
        self._whole: Callable[..., Tensor] | None = None
        # Attention of decode steps in compiled loops, over blocked keys.
        self.compiled = _is_on_cpu(weight) and self._size % SIMD_WIDTH == 0
        self._attention_step: Any = TensorAttention
        if self.compiled:
            from valor.rollout.native.compiled import CompiledAttention
            from valor.rollout.native.whole_step import WholeStep, supported

            self._attention_step = CompiledAttention
            small = sum(weight.numel() for weight in hf.parameters()) <= _MOST_WHOLE
            in_float32 = weight.dtype is self._dtype is torch.float32
            if small and in_float32 and supported(self._layers, self._norm, activation):
                sizes = {"heads": self._heads, "kv_heads": self._kv_heads, "size": self._size}
                self._whole = WholeStep(self._layers, self._norm, self._head, scaling=attention.scaling, **sizes)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, cache: SlotCache) -> Tensor:
        """Logits [B, V] after a decode step's tokens [B, 1], whose keys and values go to `cache`."""
        hidden = self._embed(input_ids)[:, 0]
        cos, sin = self._angles(hidden, position_ids, cache)
        if self._whole is not None:
            return self._whole(hidden, cos, sin, cache)
        attend = self._attention_step(cache, cos, sin, self._heads, self._rule.scaling)
        x = hidden.to(self._dtype)
        for number, layer in enumerate(self._layers):
            x = self._after_attention(layer, x, attend(number, self._qkv(layer, x).to(hidden.dtype)))
        return self._head(self._norm(x))

    def prefill(self, prompts: Sequence[Sequence[int]], cache: PromptCache) -> None:
        """Keys and values of the prompts to `cache`, padded on the right. Only attention computes with the padding."""
        device, width = self._embed.weight.device, max(map(len, prompts))
        hidden = self._embed(torch.tensor([[*chain.from_iterable(prompts)]], device=device))[0]
        tokens = [row * width + column for row, prompt in enumerate(prompts) for column in range(len(prompt))]
        index = torch.tensor(tokens, device=device)
        cos, sin = self._rotary(hidden, position_ids=torch.arange(width, device=device)[None])
        x = hidden.to(self._dtype)
        for number, layer in enumerate(self._layers):
            qkv = self._qkv(layer, x).to(hidden.dtype)
            padded = qkv.new_zeros(len(prompts) * width, *qkv.shape[1:]).index_copy_(0, index, qkv)
            query, key, value = rotated(padded.unflatten(0, (-1, width)), cos, sin, self._heads)
            cache.update(key, value, number)
            if layer is not self._layers[-1]:
                attended = prefill_attention(query, key, value, None, self._rule).flatten(2).flatten(0, 1)
                x = self._after_attention(layer, x, attended[index])

    def _qkv(self, layer: Layer, x: Tensor) -> Tensor:
        """[N, heads + 2 kv heads, D] from the layer's input x [N, hidden]."""
        qkv = layer.qkv(layer.before(x)).view(len(x), -1, self._size)
        if layer.head_norms is None:
            return qkv
        query, key, value = qkv.split([self._heads, self._kv_heads, self._kv_heads], dim=1)
        return torch.cat([layer.head_norms[0](query), layer.head_norms[1](key), value], dim=1)

    def _after_attention(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from its input x and the output of its attention [N, heads * D]."""
        x = layer.out(attended.to(x.dtype)).add_(x)
        inner = layer.between(x)
        inner = layer.up(inner).mul_(self._activation(layer.gate(inner)))
        return layer.down(inner).add_(x)

    def _angles(self, hidden: Tensor, position_ids: Tensor, cache: SlotCache) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, 1, D], from a table where angles depend on the position alone."""
        if any(kind in self._rotary.rope_type for kind in ("dynamic", "longrope")):
            return self._rotary(hidden, position_ids=position_ids)
        longest = cache.prompt_width + cache.width
        if self.angle_table is None or len(self.angle_table[0]) < longest:
            positions = torch.arange(2 * longest + MIN_GROWTH, device=hidden.device)[None]
            cos, sin = self._rotary(hidden, position_ids=positions)
            self.angle_table = cos[0], sin[0]
        cos, sin = (table.index_select(0, position_ids[:, 0])[:, None] for table in self.angle_table)
        return cos, sin


class TensorAttention:
    """Attention of one decode step of all layers by tensor operations; cos, sin [B, 1, D] of the new tokens."""

    def __init__(self, cache: SlotCache, cos: Tensor, sin: Tensor, heads: int, scaling: float) -> None:
        self._cache, self._angles, self._heads = cache, (cos, sin), heads
        self._rule = ScoreRule(scaling, None, None)
        with serving(cache):
            self._mask = slot_mask(1, cache.width, mask_function=causal_mask_function, device=cos.device)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """[B, heads * D] from qkv [B, heads + 2 kv heads, D]."""
        query, key, value = rotated(qkv[:, None], *self._angles, self._heads)
        key, value = self._cache.update(key, value, layer)
        return decode_attention(query, key, value, self._mask, self._rule).flatten(1)


def rotated(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, (kv) heads, q, D] of qkv [B, q, heads + 2 kv heads, D], the first two after rotary
    embedding by cos and sin [B or 1, q, D]."""
    kv_heads, half = (qkv.shape[2] - heads) // 2, qkv.shape[3] // 2
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    qk, value = qkv.split([heads + kv_heads, kv_heads], dim=2)
    turned = qk * cos
    turned[..., :half].addcmul_(qk[..., half:], sin[..., :half], value=-1)
    turned[..., half:].addcmul_(qk[..., :half], sin[..., half:])
    query, key = turned.transpose(1, 2).split([heads, kv_heads], dim=1)
    return query, key, value.transpose(1, 2)


def agrees(decoder: Decoder, hf: Any) -> bool:
    """Whether a prefill and a decode step give the model's own logits for two prompts; inside `generation_mode`."""
    weight = hf.get_input_embeddings().weight
    rows, last, ids = trial(decoder, len(weight), weight.device)
    full = PromptCache()
    with serving(full):
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        inputs = {"input_ids": ids, "position_ids": positions, cache_argument(hf): full}
        expected = hf(**inputs, use_cache=True).logits[last].float()
    rows.advance()
    logits = decoder(ids[last][:, None], rows.positions[:, None], rows).float()
    tolerance = 1e-5 if weight.dtype is torch.float32 else 0.1  # what goes wrong goes wrong by much more
    return bool((logits - expected).norm() <= tolerance * expected.norm())


def trial(
    decoder: Decoder, vocab: int, device: torch.device, *, bucketed: bool = False
) -> tuple[SlotCache, tuple[Tensor, Tensor], Tensor]:
    """The beginnings of two rows of token ids [2, 6], decoded as far as the index `last`, which was not fed yet."""
    lengths = [5, 3]
    texts = [[(7919 * number + 13) % vocab for number in range(6 * row, 6 * row + 6)] for row in range(2)]
    ids, prompts = torch.tensor(texts, device=device), PromptCache()
    decoder.prefill([text[:length] for text, length in zip(texts, lengths, strict=True)], prompts)
    rows = SlotCache(3 if bucketed else 2, shared=False, blocked=decoder.compiled, bucketed=bucketed)
    rows.reserve_prompts(2, max(lengths))
    numbers = [rows.add_prompt(prompts, row, length, slice(row, row + 1)) for row, length in enumerate(lengths)]
    rows.arrange(numbers, lengths, device)
    return rows, (torch.arange(2, device=device), torch.tensor(lengths, device=device)), ids
