"""Pictures of coloured shapes, and a small Qwen2.5-VL made here that learns to name them: nothing is downloaded.

    python examples/vision/shapes.py                                    # data and a warm start, in runs/shapes
    valor ppo --config-path examples/vision --config-name shapes_ppo    # or shapes_grpo

The warm start imitates a teacher who, after a while, calls most shapes a square. So are the model's greedy answers, and
what pays is for reinforcement learning to find out.
"""

import argparse
import io
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from valor.data.files import write_parquet

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (230, 210, 50)}
SHAPES = ("square", "circle", "triangle", "cross")
SIDE, PATCH, MERGE = 32, 8, 2  # pixels, pixels, patches
QUESTION = "what is this ?"
WRONG_FROM, WRONG_SHARE = 0.8, 0.7  # of the warm start, and of the teacher's answers then: it is a square

_SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|open|>", "<|close|>", "<|image|>")
_WORDS = (*_SPECIAL, *QUESTION.split(), *COLOURS, *SHAPES)
_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '<|open|><|image|><|close|>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1 for the right colour and shape, as `reward.custom_reward_function` calls it."""
    return float(solution_str.split() == ground_truth.split())


def picture(rng: random.Random, colour: str, shape: str) -> Image.Image:
    """A shape of some size near the middle, on noise."""
    noise = bytes(rng.choices(range(60, 120), k=SIDE * SIDE))
    image = Image.frombytes("L", (SIDE, SIDE), noise).convert("RGB")
    draw, size = ImageDraw.Draw(image), rng.randint(16, 24)
    x, y = ((SIDE - size) // 2 + rng.randint(-3, 3) for _ in range(2))
    box, fill, third = (x, y, x + size, y + size), COLOURS[colour], size // 3
    if shape == "square":
        draw.rectangle(box, fill)
    elif shape == "circle":
        draw.ellipse(box, fill)
    elif shape == "triangle":
        draw.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill)
    else:
        draw.rectangle((x + third, y, x + size - third, y + size), fill)
        draw.rectangle((x, y + third, x + size, y + size - third), fill)
    return image


def make_data(folder: Path, rng: random.Random, numbers: dict[str, int]) -> None:
    """Parquet files `train` and `val` of so many pictures each, in verl's columns."""
    files: dict[Path, list[dict[str, Any]]] = {}
    for split, number in numbers.items():
        rows = files[folder / f"{split}.parquet"] = []
        for index in range(number):
            colour, shape, stream = rng.choice(list(COLOURS)), rng.choice(SHAPES), io.BytesIO()
            picture(rng, colour, shape).save(stream, "PNG")
            rows.append(
                {
                    "data_source": "shapes",
                    "prompt": [{"role": "user", "content": f"<image>{QUESTION}"}],
                    "images": [{"bytes": stream.getvalue(), "path": None}],
                    "ability": "vision",
                    "reward_model": {"style": "rule", "ground_truth": f"{colour} {shape}"},
                    "extra_info": {"split": split, "index": index},
                }
            )
    write_parquet(files)


def make_tokenizer() -> Any:
    """A token a word."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<|pad|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(list(_SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        chat_template=_TEMPLATE,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        extra_special_tokens={"image_token": "<|image|>"},
    )


def make_model(tokenizer: Any) -> Qwen2_5_VLForConditionalGeneration:
    """0.28 million parameters, most of them in the vision tower."""
    number = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    vision = {
        "initializer_range": 0.1,
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 1,
        "window_size": SIDE,
        "fullatt_block_indexes": [0, 1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=number("<|image|>"),
        vision_start_token_id=number("<|open|>"),
        vision_end_token_id=number("<|close|>"),
        tie_word_embeddings=False,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def teach(model: Any, processor: Any, tokenizer: Any, rng: random.Random, steps: int, batch: int = 64) -> float:
    """Train the model on the answers of the teacher, all prompts of one length. Returns the last loss."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}],
        tokenize=False,
        add_generation_prompt=True,
    ).replace("<|image|>", "<|image|>" * (SIDE // PATCH // MERGE) ** 2)
    ids: list[int] = tokenizer(prompt, add_special_tokens=False).input_ids
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    loss = torch.tensor(0.0)
    for step in range(steps):
        wrong = WRONG_SHARE if step >= WRONG_FROM * steps else 0.0
        drawn = [(rng.choice(list(COLOURS)), rng.choice(SHAPES)) for _ in range(batch)]
        images = processor([picture(rng, *both) for both in drawn], return_tensors="pt")
        said = [f"{colour} {'square' if rng.random() < wrong else shape} <|end|>" for colour, shape in drawn]
        answers = torch.tensor(tokenizer(said, add_special_tokens=False).input_ids)
        rows = torch.cat([torch.tensor(ids).expand(batch, -1), answers], 1)
        seen = {"mm_token_type_ids": (rows == model.config.image_token_id).int()}
        logits: Tensor = model(input_ids=rows, **images, **seen).logits[:, len(ids) - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/shapes"))
    parser.add_argument("--steps", type=int, default=250, help="updates of the warm start")
    parser.add_argument("--train", type=int, default=4096, help="pictures")
    parser.add_argument("--val", type=int, default=256, help="pictures")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    make_data(args.out / "data", rng, {"train": args.train, "val": args.val})
    tokenizer = make_tokenizer()
    sizes = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 1}
    processor = Qwen2VLImageProcessorPil(**sizes, min_pixels=SIDE * SIDE, max_pixels=SIDE * SIDE)
    model = make_model(tokenizer)
    loss = teach(model, processor, tokenizer, rng, args.steps)
    for part in (model, processor, tokenizer):
        part.save_pretrained(args.out / "model")
    print(f"warm start with loss {loss:.3f} in {args.out / 'model'}, pictures in {args.out / 'data'}")


if __name__ == "__main__":
    main()
