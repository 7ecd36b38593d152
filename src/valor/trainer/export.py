"""A role of a checkpoint as a plain Hugging Face directory, without the run that wrote it."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from valor.engines import checkpoint as engine_checkpoint
from valor.engines.checkpoint import MODEL_CONFIG_DIR
from valor.errors import UserError
from valor.models.export import export_hf
from valor.models.hf import quiet_transformers
from valor.models.lora import ADAPTER_DIR, CONFIG_FILE, inject, read_adapter_config
from valor.models.policy import PolicyModel
from valor.models.reward import RewardModel
from valor.models.value import ValueModel
from valor.trainer.checkpoints import verify

TOKENIZER_DIR = "tokenizer"


def export_checkpoint(checkpoint: Path, out: Path, role: str) -> None:
    """Write `checkpoint`/`role` (actor, critic, reward_model) to `out` with its tokenizer.

    Any world size wrote it, one process reads it. Adapters are merged into their base model, which is loaded again.
    UserError: no whole checkpoint there, no such role in it, or `out` has files in it already.
    """
    folder = checkpoint / role
    verify(checkpoint, only=f"{role}/")
    if role not in _roles(checkpoint):
        raise UserError(f"'{checkpoint}' holds no {role}: it has {', '.join(sorted(_roles(checkpoint)))}")
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise UserError(f"'{out}' is not empty: give a new folder")
    config = AutoConfig.from_pretrained(folder / MODEL_CONFIG_DIR)
    if role.startswith("critic"):  # or a member of an ensemble: critic_2, …
        model = ValueModel(_empty(AutoModelForTokenClassification, folder, config))
    elif role == "reward_model":
        model = RewardModel(_empty(AutoModelForSequenceClassification, folder, config))
    else:
        model = PolicyModel(_empty(AutoModelForCausalLM, folder, config))
    engine_checkpoint.load(folder, model, None)
    export_hf(model, out, tokenizer=AutoTokenizer.from_pretrained(checkpoint / TOKENIZER_DIR))


def _empty(auto: Any, folder: Path, config: Any) -> Any:
    """A model for the weights in `folder` to be read into: where they are adapters, their base with such adapters."""
    described = folder / MODEL_CONFIG_DIR / ADAPTER_DIR
    if not (described / CONFIG_FILE).is_file():
        return auto.from_config(config, dtype=torch.float32)
    adapter = read_adapter_config(described)
    base = adapter.base_model_name_or_path
    try:
        with quiet_transformers():
            hf = auto.from_pretrained(base, config=config, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise UserError(f"'{folder}' holds adapters of '{base}', which cannot be loaded any more: {error}") from error
    inject(hf, adapter)
    return hf


def _roles(checkpoint: Path) -> list[str]:
    return [p.name for p in checkpoint.iterdir() if (p / MODEL_CONFIG_DIR).is_dir()]
