"""megatron-core's GPTModel for a transformers model's config, behind the face of a transformers model."""

# pyright: reportMissingImports=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from valor.config.engine import MegatronConfig
from valor.engines.megatron.layout import mpu
from valor.errors import UserError
from valor.models.attention import Segments
from valor.models.packing import packed_attention

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")


def transformer_config(hf: Any, megatron: MegatronConfig, *, recompute: bool) -> TransformerConfig:
    """UserError: an architecture that is not in `MODEL_TYPES`, sizes that do not divide it, fields that do not fit."""
    config, sizes = hf.config, megatron.sizes
    _refuse_what_is_missing(hf, config)
    _check_sizes(config, megatron)
    heads, experts, dtype = config.num_attention_heads, num_experts(config), getattr(torch, megatron.dtype)
    keys: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "ffn_hidden_size": config.intermediate_size,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": config.model_type.startswith("qwen3"),
        "add_bias_linear": False,
        "add_qkv_bias": config.model_type == "qwen2",
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "bias_activation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "perform_initialization": False,  # weights are read
        "tensor_model_parallel_size": sizes["tensor"],
        "pipeline_model_parallel_size": sizes["pipeline"],
        "context_parallel_size": sizes["context"],
        "expert_model_parallel_size": sizes["expert"],
        "expert_tensor_parallel_size": megatron.expert_tensor_parallel_size,
        "sequence_parallel": sizes["tensor"] > 1,
        "cp_comm_type": "a2a",
        "moe_token_dispatcher_type": "alltoall",
        "variable_seq_lengths": True,  # micro-batches of stages that follow each other differ in size
        "calculate_per_token_loss": True,  # gradients add up: losses are divided by global denominators
    }
    if experts:
        keys |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", config.intermediate_size),
            "moe_layer_freq": [int(_is_sparse(config, layer)) for layer in range(config.num_hidden_layers)],
            "moe_router_topk": config.num_experts_per_tok,
            "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
            "moe_router_load_balancing_type": "none",
        }
    if recompute:
        keys |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    try:
        return TransformerConfig(**(keys | megatron.override_transformer_config))
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"megatron-core refuses this model, or override_transformer_config: {error}") from error


def _check_sizes(config: Any, megatron: MegatronConfig) -> None:
    """UserError: parallel parts that do not divide what they share."""
    sizes, overrides = megatron.sizes, megatron.override_transformer_config
    uneven = any(name.startswith(("num_layers_in_", "pipeline_model_parallel_layout")) for name in overrides)
    for what, count, size in (
        ("key-value heads", config.num_key_value_heads, sizes["tensor"]),
        ("heads of a process", config.num_attention_heads // sizes["tensor"], sizes["context"]),
        ("layers", 0 if uneven else config.num_hidden_layers, sizes["pipeline"]),
        ("experts", num_experts(config), sizes["expert"]),
    ):
        if count % size:
            raise UserError(f"megatron: {size} parallel parts do not divide the model's {count} {what}")


def num_experts(config: Any) -> int:
    return getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0


def _is_sparse(config: Any, layer: int) -> bool:
    step = getattr(config, "decoder_sparse_step", 1)
    return layer not in (getattr(config, "mlp_only_layers", None) or ()) and (layer + 1) % step == 0


def _refuse_what_is_missing(hf: Any, config: Any) -> None:
    why = None
    kinds = set(getattr(config, "layer_types", None) or ())
    if config.model_type not in MODEL_TYPES:
        why = f"it knows {', '.join(MODEL_TYPES)}, not '{config.model_type}'"
    elif kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
        why = "the model has a sliding window"
    elif hf.base_model.rotary_emb.attention_scaling != 1.0:
        why = f"rope type '{hf.base_model.rotary_emb.rope_type}' scales attention"
    elif config.hidden_act != "silu" or getattr(config, "mlp_bias", False):
        why = "its MLP is not that of Llama"
    elif config.model_type != "qwen2" and getattr(config, "attention_bias", False):
        why = "its attention has biases"
    if why:
        raise UserError(f"strategy=megatron cannot train '{config.name_or_path}': {why}; use strategy=fsdp2")


class Attention(nn.Module):
    """megatron-core's place for attention, filled with ours: packed rows (`Segments`, as `attention_bias`), or padded
    ones, which need no mask."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.is_causal, self._scale = True, softmax_scale
        self.num_key_value_groups = config.num_attention_heads // (config.num_query_groups or 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        attention_bias: Segments | None,
        **_: Any,
    ) -> Tensor:
        """[s, b, heads * D] of [s, b, heads, D]."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = packed_attention(self, query, key, value, None, segments=attention_bias, scaling=self._scale)[0]
        return out.transpose(0, 1).flatten(2).contiguous()


class Norm(nn.RMSNorm):
    """RMSNorm without Transformer Engine; its weight says where positions are shared."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def build_stage(hf: Any, config: TransformerConfig, *, head: nn.Linear | None) -> GPTModel:
    """This stage's layers, with memory for the weights but not yet these.

    head: what the last stage has in place of the language model's head, such as a critic's.
    """
    spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    spec.layer_norm = Norm
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
        inside = parts.self_attention.submodules
        inside.core_attention = Attention
        if config.qk_layernorm:
            inside.q_layernorm = inside.k_layernorm = Norm
    last = mpu.is_pipeline_last_stage()
    vocab, tensor = hf.config.vocab_size, config.tensor_model_parallel_size
    stage = GPTModel(
        config,
        spec,
        vocab_size=vocab + -vocab % tensor,
        max_sequence_length=hf.config.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=last,
        share_embeddings_and_output_weights=head is None and hf.config.tie_word_embeddings,
        position_embedding_type="none",  # rotary, by the frequencies of transformers
    )
    if last and head is not None:
        del stage.output_layer
        stage.score = nn.Linear(
            head.in_features, head.out_features, head.bias is not None, device=torch.cuda.current_device()
        )
    stage.to(torch.cuda.current_device())  # megatron-core makes routers on the host
    for parameter in stage.parameters():
        parameter.data.zero_()  # also the rows that fill up the vocabulary
    return stage


class StageEnd(Exception):
    """The model goes on in the next stage, which is sent the states [s, b, H], its only argument."""


class Face(nn.Module):
    """A stage as our models see a transformers model: hidden states for packed or padded rows, and the head's weight.

    shares_tokens: the tensor parallel ranks compute the log-probs of different tokens, so the gradients of hidden
    states and of the head's weight, which each of them has whole, add up.
    """

    def __init__(self, stage: GPTModel, hf: Any, *, shares_tokens: bool) -> None:
        super().__init__()
        self.stage, self.config, self._shares_tokens = stage, hf.config, shares_tokens
        self._padding: int | None = hf.get_input_embeddings().padding_idx
        self.frequencies: Tensor
        self.register_buffer("frequencies", hf.base_model.rotary_emb.inv_freq.float(), persistent=False)

    @property
    def base_model(self) -> Face:
        return self

    @property
    def score(self) -> nn.Linear:
        return self.stage.score  # type: ignore[return-value]

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, segments: Segments | None = None, **_: Any
    ) -> SimpleNamespace:
        """`last_hidden_state` [b, s, H] of the last stage; another one raises StageEnd."""
        stage = self.stage
        positions = (
            torch.arange(input_ids.shape[1], device=input_ids.device) if position_ids is None else position_ids[0]
        )
        angles = positions[:, None].float() * self.frequencies.to(positions.device)
        rotary = torch.cat([angles, angles], dim=-1)[:, None, None]
        states = self._embedded(input_ids) if stage.pre_process else None
        states = stage.decoder(states, attention_mask=None, rotary_pos_emb=rotary, attention_bias=segments)
        if not stage.post_process:
            raise StageEnd(states)
        if stage.config.sequence_parallel:
            states = tensor_parallel.gather_from_sequence_parallel_region(
                states, tensor_parallel_output_grad=self._shares_tokens
            )
        elif self._shares_tokens:
            states = tensor_parallel.copy_to_tensor_model_parallel_region(states)
        return SimpleNamespace(last_hidden_state=states.transpose(0, 1))

    def _embedded(self, input_ids: Tensor) -> Tensor:
        """[s, b, H], or this rank's positions of it; the padding token's row has no gradient, as in transformers."""
        states = self.stage.embedding(input_ids, position_ids=None)
        if self._padding is None:
            return states
        padding = (input_ids == self._padding).t()[..., None]
        if self.stage.config.sequence_parallel:
            group = mpu.get_tensor_model_parallel_group()
            padding = padding.chunk(group.size())[group.rank()]
        return torch.where(padding, states.detach(), states)

    def get_output_embeddings(self) -> SimpleNamespace:
        """The head's weight [V, H], gathered."""
        stage = self.stage
        part = stage.output_layer.weight
        part = stage.shared_embedding_or_output_weight() if part is None else part
        weight = tensor_parallel.gather_from_sequence_parallel_region(part)
        return SimpleNamespace(weight=weight[: self.config.vocab_size], bias=None)

    def get_input_embeddings(self) -> SimpleNamespace:
        """Tells where token ids are read."""
        return SimpleNamespace(weight=next(self.stage.parameters()))
