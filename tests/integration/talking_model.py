"""A tiny model that has learnt to speak in short turns, some of which search and some of which answer."""

import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from valor.lab import arithmetic

STEPS, ROWS, LENGTH = 300, 8, 48


def _turns(rng: random.Random) -> str:
    """What is told and what is said to it, again and again."""
    text = ""
    for _ in range(LENGTH // 4):  # a turn has at least four tokens
        told = "".join(rng.choices("0123456789+=", k=rng.randint(2, 6)))
        word = "".join(rng.choices("abc", k=2))
        said = rng.choice([word, f"<search>{word}</search>", f"<search>{word}</search>", f"<answer>{word}</answer>"])
        text += f"{told}<|assistant|>{said}<|end|>"
    return text


def make_talking_model(folder: Path) -> Path:
    """The model of the embedded task after a few seconds of training."""
    made = arithmetic.make_model(folder, seed=0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    # Decay keeps weights small, and with them what float32 rounds off: log-probs are compared to 1e-4.
    rng, optimizer = random.Random(0), torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1.0)
    for _ in range(STEPS):
        rows = tokenizer([_turns(rng) for _ in range(ROWS)], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([row[:LENGTH] for row in rows])
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(made)
    return made
