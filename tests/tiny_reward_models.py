"""Tiny random reward models of several families, each with a tokenizer of its own (a token a character)."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DebertaV2Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SIZE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def character_tokenizer(*, pair: bool = False, template: str | None = None) -> PreTrainedTokenizerFast:
    """Adds <s> in front of a text; with `pair`, [CLS] and [SEP] as BERT does, and no <s>."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"] if pair else ["<pad>", "<unk>", "<s>", "</s>"]
    vocab = {token: i for i, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=special[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    if pair:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
        inputs = ["input_ids", "token_type_ids", "attention_mask"]
        names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "model_input_names": inputs}
    else:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
        names = {"bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], unk_token=special[1], model_max_length=10**12, **names
    )
    fast.chat_template = template
    return fast


def deberta_tokenizer() -> DebertaV2Tokenizer:
    """DeBERTa-v2's own kind, with a vocabulary of characters."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return DebertaV2Tokenizer(vocab=[*((t, 0.0) for t in special), *((c, -3.0) for c in ["▁", *CHARACTERS[1:-1]])])


def save(model: Any, tokenizer: Any, path: Path, seed: int) -> Path:
    """Random weights of a size at which the scores of different texts differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
            elif name.endswith("bias"):
                weight.zero_()
    model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path


def make_classifier(
    path: Path,
    *,
    num_labels: int = 1,
    template: str | None = TEMPLATE,
    pad_token_id: int | None = 0,
    num_key_value_heads: int = 1,
    seed: int = 0,
) -> Path:
    """A causal sequence classifier (Llama); `template` None: plain text."""
    tokenizer = character_tokenizer(template=template)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        num_key_value_heads=num_key_value_heads,
        num_labels=num_labels,
        pad_token_id=pad_token_id,
        **SIZE,
    )
    return save(LlamaForSequenceClassification(config), tokenizer, path, seed)


def make_backbone(path: Path, seed: int = 0) -> Path:
    """A causal language model, to train a reward model from."""
    tokenizer = character_tokenizer(template=TEMPLATE)
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, num_key_value_heads=1, **SIZE)
    config.pad_token_id = None
    return save(LlamaForCausalLM(config), tokenizer, path, seed)


def make_bert(path: Path, seed: int = 0) -> Path:
    """An encoder that tells the two texts of a pair apart."""
    tokenizer = character_tokenizer(pair=True)
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=128, num_labels=1, **SIZE)
    return save(BertForSequenceClassification(config), tokenizer, path, seed)


def make_deberta(path: Path, seed: int = 0) -> Path:
    """A cross-encoder as OpenAssistant's reward models are."""
    tokenizer = deberta_tokenizer()
    config = DebertaV2Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        num_labels=1,
        relative_attention=True,
        position_buckets=16,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        position_biased_input=False,
        type_vocab_size=0,
        **SIZE,
    )
    return save(DebertaV2ForSequenceClassification(config), tokenizer, path, seed)
