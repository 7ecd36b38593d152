"""A role of a checkpoint as a plain Hugging Face directory, without the run that wrote it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from valor.config import FSDPConfig
from valor.engines import distributed
from valor.engines.fsdp import TrainEngine
from valor.errors import UserError
from valor.models.policy import PolicyModel
from valor.models.reward import RewardModel
from valor.models.value import ValueModel
from valor.workers.model_role import MODEL_CONFIG_DIR

TOKENIZER_DIR = "tokenizer"


def export_checkpoint(checkpoint: Path, out: Path, role: str) -> None:
    """Write `checkpoint`/`role` (actor, critic, reward_model) to `out` with its tokenizer.

    Any world size wrote it, one process reads it.
    UserError: no complete checkpoint there, no such role in it, or `out` has files in it already.
    """
    folder = checkpoint / role
    if not (checkpoint / "trainer.json").is_file():
        raise UserError(f"'{checkpoint}' is not a Valor checkpoint: give a global_step_N folder of a run")
    if not folder.is_dir():
        raise UserError(f"'{checkpoint}' holds no {role}: it has {', '.join(sorted(_roles(checkpoint)))}")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"'{out}' is not empty: give a new folder")
    config = AutoConfig.from_pretrained(folder / MODEL_CONFIG_DIR)
    if role.startswith("critic"):  # or a member of an ensemble: critic_2, …
        model = ValueModel(AutoModelForTokenClassification.from_config(config, dtype=torch.float32))
    elif role == "reward_model":
        model = RewardModel(AutoModelForSequenceClassification.from_config(config, dtype=torch.float32))
    else:
        model = PolicyModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    device = distributed.init_process_group("cpu")
    try:
        engine = TrainEngine(model, fsdp=FSDPConfig(dtype="float32"), optim=None, device=device)
        engine.load(folder)
        engine.export_hf(out, tokenizer=AutoTokenizer.from_pretrained(checkpoint / TOKENIZER_DIR))
    finally:
        distributed.destroy_process_group()


def _roles(checkpoint: Path) -> list[str]:
    return [p.name for p in checkpoint.iterdir() if (p / MODEL_CONFIG_DIR).is_dir()]
