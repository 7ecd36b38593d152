"""Tiny random models for the rollout tests."""

import torch
import transformers as tf

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def architecture(name: str) -> tf.PreTrainedModel:
    """A model of one family, with windows and chunks short enough to matter in the tests."""
    if name == "qwen2":
        return tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES, tie_word_embeddings=True))
    if name == "llama":
        return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES))
    if name == "mistral-window":
        return tf.MistralForCausalLM(tf.MistralConfig(**SIZES, sliding_window=8))
    if name == "gemma2":  # soft caps on attention and logits, window in every other layer
        return tf.Gemma2ForCausalLM(
            tf.Gemma2Config(**SIZES, head_dim=8, sliding_window=8, query_pre_attn_scalar=8, attn_logit_softcapping=2.0)
        )
    if name == "gemma3":
        layers = ["sliding_attention", "full_attention"]
        config = tf.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=8, query_pre_attn_scalar=8, layer_types=layers)
        return tf.Gemma3ForCausalLM(config)
    if name == "gpt-neox":
        sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
        return tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**sizes))
    if name == "gpt2":  # learned positions, and no nn.Linear but the head
        return tf.GPT2LMHeadModel(
            tf.GPT2Config(
                vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=2, bos_token_id=1
            )
        )
    if name == "gpt-oss":  # attention sinks, window, experts
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        return tf.GptOssForCausalLM(
            tf.GptOssConfig(
                **SIZES,
                head_dim=8,
                sliding_window=8,
                num_local_experts=4,
                num_experts_per_tok=2,
                rope_parameters=rope,
            )
        )
    if name == "deepseek-v3":  # the cache holds compressed latents
        sizes = SIZES | {"num_key_value_heads": 4}
        ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**sizes, **ranks, first_k_dense_replace=2))
    if name == "llama4":  # chunked attention
        config = tf.Llama4TextConfig(
            **SIZES, head_dim=8, attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=48
        )
        return tf.Llama4ForCausalLM(config)
    raise KeyError(name)


ARCHITECTURES = [
    "qwen2",
    "llama",
    "mistral-window",
    "gemma2",
    "gemma3",
    "gpt-neox",
    "gpt2",
    "gpt-oss",
    "deepseek-v3",
    "llama4",
]


def random_model(name: str) -> tf.PreTrainedModel:
    """The same float32 weights every time, wide enough that probabilities are far from uniform."""
    model = architecture(name)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2, generator=generator)
    return model.float().eval()
