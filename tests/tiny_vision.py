"""A tiny random model that reads images, its processor, and pictures: made in a moment, without torchvision."""

import io
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from valor.models.internals import processor_without_video

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
END, IMAGE = 2, 5  # numbers of tokens
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
}
_PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 2}
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2_vl": (
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        {"embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
}


def make_model(path: Path, family: str = "qwen2_5_vl") -> Path:
    """Weights are eight times as large as transformers draws them: logits differ, and so do pictures."""
    kind, cls, vision = _FAMILIES[family]
    vocab = {token: i for i, token in enumerate([*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": _SPECIAL}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=_TEMPLATE, **special)
    ends = {"bos_token_id": 0, "eos_token_id": END, "pad_token_id": 0}
    config = kind(
        text_config={**_TEXT, **ends, "vocab_size": len(vocab)},
        vision_config={**_PATCHES, **vision},
        image_token_id=IMAGE,
        video_token_id=len(vocab) - 1,
        vision_start_token_id=3,
        vision_end_token_id=4,
    )
    patches = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 1024}
    images = Qwen2VLImageProcessorPil(**patches)
    processor_without_video(config)(image_processor=images, tokenizer=fast).save_pretrained(path)
    fast.save_pretrained(path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    model.generation_config.eos_token_id = END
    model.save_pretrained(path)
    return path


def picture(width: int, height: int, seed: int) -> bytes:
    """A PNG file of random pixels."""
    from PIL import Image

    stream = io.BytesIO()
    Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height)).save(stream, "PNG")
    return stream.getvalue()
