"""Forward passes of the Llama family driven directly over its weights, for prefill and decoding.

A decode step of a small model is many tiny operations. Here projections that read the same input are one product,
activations and sums happen inside products where the CPU library can. Models of `FAMILIES` are driven this way if they
then give the logits of their own forward pass, which is tried out; all others keep that one (`packed_linears`).

Few rows are multiplied by every weight, so the time goes into reading weights. oneDNN reads its blocked layout fastest,
and in float32 it beats the BLAS behind `nn.Linear` about twofold on some processors at any number of rows
(benchmarks/rollout_speed.py). Packing costs one pass over the weights and a second copy of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function

from valor.models.linear import computing_dtype, is_replaced
from valor.models.lora import merged_weight
from valor.rollout.native.attention import ScoreRule, decode_attention, prefill_attention, serving, slot_mask
from valor.rollout.native.kv_cache import AT_ONCE, MIN_GROWTH, PromptCache, SlotCache

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma")  # by `model_type`; SmolLM2 is a llama
_LEAST_PACKED = 2**18  # numbers of a float32 weight: with fewer, the 20 µs that oneDNN takes to start cost more
_MOST_WHOLE = 2**22  # numbers of a model whose decode step is one loop: more leave the processor's caches
_TYPICAL_ROWS = 64  # for which the layout is chosen; other row counts work as well with it
_ACTIVATIONS = {"silu": ("swish", ""), "gelu_pytorch_tanh": ("gelu", "tanh"), "gelu": ("gelu", "none")}


class Product:
    """x Wᵀ + b of one linear layer, or of several that read the same x, one behind the other."""

    def __init__(self, *layers: nn.Module) -> None:
        found = [_weight_and_bias(layer) for layer in layers]
        weights, biases = [weight for weight, _ in found], [bias for _, bias in found]
        if len({bias is None for bias in biases}) > 1:
            raise TypeError("some have a bias and others have none")
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        weight = weight.to(computing_dtype(weight))
        found_biases = [bias.to(weight.dtype) for bias in biases if bias is not None]
        self._bias = torch.cat(found_biases) if found_biases else None
        self._packed = _has_packed_layout(weight) and _gains_by_it(weight)
        self._weight = _packed(weight) if self._packed else weight

    def __call__(self, x: Tensor, activation: str | None = None) -> Tensor:
        """With an activation (a name of transformers) of the result."""
        name, algorithm = _ACTIVATIONS[activation] if activation else ("none", "")
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, name, [], algorithm)
        found = F.linear(x, self._weight, self._bias)
        if not activation:
            return found
        return F.silu(found) if name == "swish" else F.gelu(found, approximate=algorithm)

    def plain(self) -> tuple[Tensor, Tensor | None]:
        """The weight [out, in] and the bias."""
        return self._weight.to_dense() if self._packed else self._weight, self._bias

    def joined(self, x: Tensor, other: Tensor, operation: Literal["add", "mul"]) -> Tensor:
        """The result plus `other`, or times `other`."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, operation)
        found = F.linear(x, self._weight, self._bias)
        return found.add_(other) if operation == "add" else found.mul_(other)


def _weight_and_bias(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Of a layer with an adapter their sum: in float32, as bfloat16 would round it, and where packing copies anyway."""
    linear = getattr(layer, "base_layer", layer)
    if type(linear) is not nn.Linear:
        raise TypeError("not a plain linear layer")
    if linear is layer:
        return linear.weight, linear.bias
    if linear.weight.dtype is not torch.float32 or not _has_packed_layout(linear.weight):
        raise TypeError("an adapter that stays beside its layer")
    return merged_weight(layer), linear.bias


def _has_packed_layout(weight: Tensor) -> bool:
    return _is_on_cpu(weight) and torch.backends.mkldnn.is_available()


def _gains_by_it(weight: Tensor) -> bool:
    """Whether products with this weight are faster in its packed layout."""
    return weight.numel() >= _LEAST_PACKED or weight.dtype is torch.bfloat16


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS)


@contextmanager
def packed_linears(root: nn.Module) -> Iterator[None]:
    """Every plain `nn.Linear` under `root` computes with a packed copy of its weight at entry where there is that
    layout; undone at exit."""
    linear = [m for m in root.modules() if type(m) is nn.Linear and not is_replaced(m)]
    linear = [m for m in linear if _has_packed_layout(m.weight)]
    before = [vars(m).get("forward") for m in linear]
    for layer in linear:
        dtype = computing_dtype(layer.weight)
        weight, bias = layer.weight.detach().to(dtype), None if layer.bias is None else layer.bias.detach().to(dtype)
        layer.forward = partial(_by_packed, _packed(weight), bias, dtype)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, forward in zip(linear, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _by_packed(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x.to(dtype), weight, bias, "none", [], "").to(x.dtype)


class Norm:
    """Root mean square norm over the last dimension."""

    def __init__(self, layer: Any) -> None:
        weight, self.eps = layer.weight, getattr(layer, "variance_epsilon", None) or layer.eps
        # Gemma's multiplies by 1 + weight. What it does to ones tells.
        plain = torch.allclose(layer(torch.ones_like(weight)).float(), weight.float(), atol=1e-2)
        self.weight = (weight if plain else 1 + weight).to(computing_dtype(weight)).detach()
        self._compiled: Callable[[Tensor], Tensor] | None = None
        if _is_on_cpu(self.weight):
            from valor.rollout.native.compiled import CompiledNorm  # numba takes half a second to load

            self._compiled = CompiledNorm(self.weight, self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        if self._compiled is not None:
            return self._compiled(x)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _is_on_cpu(weight: Tensor) -> bool:
    """In a dtype of which the CPU's fast ways know."""
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)


class Layer:
    """The weights of one decoder layer."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.before, self.between = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        self.qkv = Product(attention.q_proj, attention.k_proj, attention.v_proj)
        own = hasattr(attention, "q_norm")
        self.head_norms = (Norm(attention.q_norm), Norm(attention.k_norm)) if own else None
        self.out = Product(attention.o_proj)
        self.gate, self.up, self.down = Product(mlp.gate_proj), Product(mlp.up_proj), Product(mlp.down_proj)


class Decoder:
    """The forward pass of `hf` in generation, with a copy of its weights as they are now. Where products of its dtype
    are slow all but attention is float32.

    TypeError, KeyError or AttributeError: it is not of the family, or not in its plain form.
    """

    def __init__(self, hf: Any) -> None:
        base, config = hf.base_model, hf.config.get_text_config()
        masks = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if masks or getattr(config, "sliding_window", None) or config.model_type not in FAMILIES:
            raise TypeError("not a plain model of the Llama family")
        self._embed, self._rotary = base.embed_tokens, base.rotary_emb
        self._by_position: tuple[Tensor, Tensor] | None = None
        self._layers = [Layer(layer) for layer in base.layers]
        self._norm, self._head = Norm(base.norm), Product(hf.get_output_embeddings())
        self._heads = config.num_attention_heads
        self._kv_heads = getattr(config, "num_key_value_heads", None) or self._heads
        attention = base.layers[0].self_attn
        self._size, self._parts = attention.head_dim, [self._heads, self._kv_heads, self._kv_heads]
        self._rule = ScoreRule(attention.scaling, None, None)
        weight = base.embed_tokens.weight
        self._dtype = computing_dtype(weight)
        # Attention of decode steps, over blocked keys.
        self.compiled, self._step = _is_on_cpu(weight) and self._size % AT_ONCE == 0, StepOfTensors
        if self.compiled:
            from valor.rollout.native.compiled import CompiledStep

            self._step = CompiledStep
        self._activation = getattr(config, "hidden_act", None) or config.hidden_activation
        _ACTIVATIONS[self._activation]
        self._whole: Callable[..., Tensor] | None = None
        numbers = sum(weight.numel() for weight in hf.parameters())
        if self.compiled and weight.dtype is self._dtype is torch.float32 and numbers <= _MOST_WHOLE:
            from valor.rollout.native.whole_step import WholeStep, serves

            sizes = {"heads": self._heads, "kv_heads": self._kv_heads, "size": self._size}
            if serves(self._layers, self._norm, self._activation):
                layers, scaling = self._layers, self._rule.scaling
                self._whole = WholeStep(layers, self._norm, self._head, self._activation, scaling=scaling, **sizes)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, cache: SlotCache) -> Tensor:
        """Logits [B, V] after a decode step's tokens [B, 1], whose keys and values go to `cache`."""
        hidden = self._embed(input_ids)[:, 0]
        cos, sin = self._angles(hidden, position_ids, cache)
        if self._whole is not None:
            return self._whole(hidden, cos, sin, cache)
        attend = self._step(cache, cos, sin, self._heads, self._rule.scaling)
        x = hidden.to(self._dtype)
        for number, layer in enumerate(self._layers):
            x = self._after(layer, x, attend(number, self._qkv(layer, x).to(hidden.dtype)))
        return self._head(self._norm(x))

    def prefill(self, prompts: Sequence[Sequence[int]], cache: PromptCache) -> None:
        """Keys and values of the prompts to `cache`, padded on the right: only attention computes with the padding.

        Of the last layer nothing else is asked.
        """
        device, width = self._embed.weight.device, max(map(len, prompts))
        hidden = self._embed(torch.tensor([[*chain.from_iterable(prompts)]], device=device))[0]
        kept = [row * width + column for row, prompt in enumerate(prompts) for column in range(len(prompt))]
        places = torch.tensor(kept, device=device)
        cos, sin = self._rotary(hidden, position_ids=torch.arange(width, device=device)[None])
        x = hidden.to(self._dtype)
        for number, layer in enumerate(self._layers):
            qkv = self._qkv(layer, x).to(hidden.dtype)
            padded = qkv.new_zeros(len(prompts) * width, *qkv.shape[1:]).index_copy_(0, places, qkv)
            query, key, value = rotated(padded.unflatten(0, (-1, width)), cos, sin, self._heads)
            cache.update(key, value, number)
            if layer is not self._layers[-1]:
                found = prefill_attention(cache, query, key, value, None, self._rule).flatten(2).flatten(0, 1)
                x = self._after(layer, x, found[places])

    def _qkv(self, layer: Layer, x: Tensor) -> Tensor:
        """[N, heads + 2 kv heads, D] from the layer's input x [N, hidden]."""
        qkv = layer.qkv(layer.before(x)).view(len(x), -1, self._size)
        if layer.head_norms is None:
            return qkv
        parts = zip((*layer.head_norms, None), qkv.split(self._parts, dim=1), strict=True)
        return torch.cat([norm(part) if norm else part for norm, part in parts], dim=1)

    def _after(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from its input x and what its attention found [N, heads * D]."""
        x = layer.out.joined(attended.to(x.dtype), x, "add")
        inner = layer.between(x)
        inner = layer.up.joined(inner, layer.gate(inner, self._activation), "mul")
        return layer.down.joined(inner, x, "add")

    def _angles(self, hidden: Tensor, position_ids: Tensor, cache: SlotCache) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, 1, D] of the tokens' angles, from a table where a position has the same angles
        whatever else is read."""
        if any(kind in self._rotary.rope_type for kind in ("dynamic", "longrope")):
            return self._rotary(hidden, position_ids=position_ids)
        longest = cache.get_mask_sizes(1, 0)[0]
        if self._by_position is None or len(self._by_position[0]) < longest:
            every = torch.arange(2 * longest + MIN_GROWTH, device=hidden.device)[None]
            cos, sin = self._rotary(hidden, position_ids=every)
            self._by_position = cos[0], sin[0]
        cos, sin = (table.index_select(0, position_ids[:, 0])[:, None] for table in self._by_position)
        return cos, sin


class StepOfTensors:
    """Attention of one decode step of all layers by tensor operations; cos, sin [B, 1, D] of the new tokens."""

    def __init__(self, cache: SlotCache, cos: Tensor, sin: Tensor, heads: int, scaling: float) -> None:
        self._cache, self._angles, self._heads = cache, (cos, sin), heads
        self._rule = ScoreRule(scaling, None, None)
        with serving(cache):
            width = cache.get_mask_sizes(1, 0)[0]
            options: dict[str, Any] = {"mask_function": causal_mask_function, "device": cos.device}
            self._mask = slot_mask(q_length=1, kv_length=width, **options)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """[B, heads * D] from qkv [B, heads + 2 kv heads, D]."""
        query, key, value = rotated(qkv[:, None], *self._angles, self._heads)
        key, value = self._cache.update(key, value, layer)
        return decode_attention(self._cache, query, key, value, self._mask, self._rule).flatten(1)


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
    """Whether a prefill and a decode step give the logits of the model itself for two short prompts; inside
    `generation_mode`."""
    weight, lengths = hf.get_input_embeddings().weight, [5, 3]
    texts = [[(7919 * number + 13) % len(weight) for number in range(6 * row, 6 * row + 6)] for row in range(2)]
    ids = torch.tensor(texts, device=weight.device)
    after = torch.arange(2, device=ids.device), torch.tensor(lengths, device=ids.device)
    whole, prompts = PromptCache(), PromptCache()
    with serving(whole):
        places = torch.arange(6, device=ids.device)[None]
        expected = hf(input_ids=ids, position_ids=places, past_key_values=whole, use_cache=True).logits[after].float()
    decoder.prefill([text[:length] for text, length in zip(texts, lengths, strict=True)], prompts)
    rows = SlotCache(2, shared=False, blocked=decoder.compiled)
    rows.reserve_prompts(2, max(lengths))
    numbers = [rows.add_prompt(prompts, row, length, slice(row, row + 1)) for row, length in enumerate(lengths)]
    rows.arrange(numbers, lengths, ids.device)
    rows.advance()
    found = decoder(ids[after][:, None], rows.positions[:, None], rows).float()
    tolerance = 1e-5 if weight.dtype is torch.float32 else 0.1  # what goes wrong goes wrong by much more
    return bool((found - expected).norm() <= tolerance * expected.norm())
