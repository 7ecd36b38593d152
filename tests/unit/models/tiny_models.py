"""Tiny random models of several families and an independent way to score responses."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
)

VOCAB = 61
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ARCHITECTURES = {
    "qwen2_tied": lambda: Qwen2Config(**SIZES, num_key_value_heads=1, tie_word_embeddings=True),
    "llama_dropout": lambda: LlamaConfig(**SIZES, num_key_value_heads=2, attention_dropout=0.5),
    "gemma": lambda: GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=16),
    "gemma2_softcap": lambda: Gemma2Config(
        **SIZES, num_key_value_heads=1, head_dim=16, final_logit_softcapping=2.0, sliding_window=4
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES, attention_dropout=0.5, hidden_dropout=0.5),
    "gpt2_dropout": lambda: GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=VOCAB, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "granite_scaled": lambda: GraniteConfig(**SIZES, num_key_value_heads=1, logits_scaling=3.0),
}


def build_hf(name: str, seed: int = 0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(ARCHITECTURES[name]())


def sequences(rows: dict[str, torch.Tensor]):
    """(row, prompt length, response length, the row's tokens without padding [1, p + r])."""
    for i, (p, r) in enumerate(zip(rows["prompt_lengths"].tolist(), rows["response_lengths"].tolist(), strict=True)):
        yield i, p, r, torch.cat([rows["prompts"][i, :p], rows["responses"][i, :r]])[None]


def reference_scores(hf, rows: dict[str, torch.Tensor], temperature: float):
    """Log-probs and entropies [b, T] from the model's own full logits, one unpadded row at a time; differentiable."""
    shape = rows["responses"].shape
    log_probs, entropy = [], []
    for _, p, r, ids in sequences(rows):
        log_p = torch.log_softmax(hf(input_ids=ids).logits[0].float() / temperature, dim=-1)[p - 1 : p - 1 + r]
        pad = (0, shape[1] - r)
        log_probs.append(torch.nn.functional.pad(log_p.gather(1, ids[0, p:, None])[:, 0], pad))
        entropy.append(torch.nn.functional.pad(-(log_p.exp() * log_p).sum(-1), pad))
    return torch.stack(log_probs), torch.stack(entropy)
