"""Tiny random models that read images, their processors, and pictures: made in a moment, without torchvision."""

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Idefics3Config,
    InternVLConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from valor.models.images import policy_class
from valor.models.internals import processor_without_video

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|open|>", "<|close|>", "<image>"]
_SPECIAL += ["<video>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<row_1_col_1>"]
END, IMAGE = 2, 5  # numbers of tokens
_PARTS = "{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}"
_TEXT_OR_PARTS = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{_PARTS}{{% endif %}}"
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\nCONTENT<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_model(path: Path, family: str = "qwen2_5_vl", *, wide: bool = False) -> Path:
    """`wide`: with heads that vLLM has kernels for. Weights are eight times as large as transformers draws them: logits
    differ, and so do pictures. Skips the test where the family's processor needs a library that is missing."""
    vocab = {token: i for i, token in enumerate([*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    config, images, options = _family(family, len(vocab), wide)
    config.text_config.bos_token_id, config.text_config.eos_token_id, config.text_config.pad_token_id = 0, END, 0
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    qwen = family.startswith("qwen")  # the templates of others know parts alone
    template = _TEMPLATE.replace("CONTENT", _TEXT_OR_PARTS if qwen else _PARTS)
    shown = {"gemma3": "<|open|>"}.get(family, "<|open|><image><|close|>" if qwen else "<image>")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template.replace("IMAGE", shown),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=_SPECIAL,
        extra_special_tokens={
            "image_token": "<image>",
            "context_image_token": "<image>",
            "video_token": "<video>",
            "start_image_token": "<|open|>",
            "end_image_token": "<|close|>",
            "boi_token": "<|open|>",
            "eoi_token": "<|close|>",
        },
    )
    try:
        kind = processor_without_video(config)
        kind(image_processor=images, tokenizer=fast, **options).save_pretrained(path)
        fast.save_pretrained(path)
        config.save_pretrained(path)
        kind.from_pretrained(path, video_processor=None)
    except (ImportError, ValueError) as error:
        if missing := next((name for name in ("torchvision", "num2words") if name in str(error)), None):
            pytest.skip(f"the processor of {family} needs {missing} here")
        raise
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = policy_class(config).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
        if family == "gemma3":  # whose projection begins as zeros
            model.model.multi_modal_projector.mm_input_projection_weight.normal_()
    model.generation_config.eos_token_id = END
    model.save_pretrained(path)
    return path


def _family(family: str, vocab: int, wide: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Config, image processor, and further arguments of the processor."""
    text = {**_TEXT, "vocab_size": vocab}
    text |= {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1} if wide else {}
    width = text["hidden_size"]
    if family in ("idefics3", "smolvlm"):
        kind, images = (
            (Idefics3Config, Idefics3ImageProcessorPil)
            if family == "idefics3"
            else (SmolVLMConfig, SmolVLMImageProcessorPil)
        )
        vision = {**_VISION, "image_size": 16, "patch_size": 4}
        text |= {"model_type": "llama"}
        config = kind(text_config=text, vision_config=vision, image_token_id=IMAGE, scale_factor=2)
        size = {"longest_edge": 16}
        options = {"image_seq_len": 4} | ({"video_processor": None} if family == "smolvlm" else {})
        return config, images(size=size, max_image_size=size), options
    if family == "gemma3":
        vision = {**_VISION, "image_size": 16, "patch_size": 4}
        text |= {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16, "rope_parameters": None}
        text |= {"layer_types": ["sliding_attention", "full_attention"]}
        tokens = {"image_token_index": IMAGE, "boi_token_index": 3, "eoi_token_index": 4, "mm_tokens_per_image": 4}
        config = Gemma3Config(text_config=text, vision_config=vision, **tokens)
        return config, Gemma3ImageProcessorPil(size={"height": 16, "width": 16}), {"image_seq_length": 4}
    if family == "internvl":
        vision = {**_VISION, "image_size": [16, 16], "patch_size": [4, 4]}
        text |= {"model_type": "qwen2"}
        config = InternVLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, image_seq_length=4)
        size = {"height": 16, "width": 16}
        return config, GotOcr2ImageProcessorPil(size=size, max_patches=4), {"image_seq_length": 4}
    text["rope_parameters"] = {**_TEXT["rope_parameters"], "mrope_section": [4, 6, 6] if wide else [1, 1, 2]}
    vision = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 2, "num_heads": 2}
    kind: Any = Qwen2VLConfig
    if family == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": width, "mlp_ratio": 2}
    elif family == "qwen3_vl":
        kind = Qwen3VLConfig
        text["head_dim"] = 32 if wide else 8
        vision |= {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": width}
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    else:
        kind = Qwen2_5_VLConfig
        vision |= {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": width}
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    tokens = {"image_token_id": IMAGE, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
    patches = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 1024}
    return kind(text_config=text, vision_config=vision, **tokens), Qwen2VLImageProcessorPil(**patches), {}


def picture(width: int, height: int, seed: int) -> bytes:
    """A PNG file of random pixels."""
    from PIL import Image

    stream = io.BytesIO()
    Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height)).save(stream, "PNG")
    return stream.getvalue()
