"""A role of a checkpoint as a plain Hugging Face directory, without the run that wrote it."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
)

from valor.engines import checkpoint as engine_checkpoint
from valor.engines.checkpoint import MODEL_CONFIG_DIR
from valor.errors import UserError
from valor.models.classifier import register_classifier
from valor.models.export import copy_processor, export_hf
from valor.models.hf import quiet_transformers
from valor.models.images import policy_class
from valor.models.lora import ADAPTER_DIR, CONFIG_FILE, inject, read_adapter_config
from valor.models.policy import PolicyModel
from valor.models.reward import RewardModel
from valor.models.value import ValueModel
from valor.trainer.checkpoints import verify

TOKENIZER_DIR = "tokenizer"
_KINDS: list[tuple[str, Any, Any]] = [  # by the end of the class that the checkpoint names
    ("ForTokenClassification", ValueModel, AutoModelForTokenClassification),
    ("ForSequenceClassification", RewardModel, AutoModelForSequenceClassification),
    ("", PolicyModel, None),  # `policy_class`
]


def export_checkpoint(checkpoint: Path, out: Path, role: str) -> None:
    """Write `checkpoint`/`role` (actor, critic, reward_model) to `out` with its tokenizer, from any world size.

    Adapters are merged into their base model, which is loaded again. UserError: no complete checkpoint, no such role in
    it, a model with code of its own, or `out` has files already.
    """
    folder = checkpoint / role
    step = verify(checkpoint, only=f"{role}/")["step"]
    roles = sorted(path.name for path in checkpoint.iterdir() if (path / MODEL_CONFIG_DIR).is_dir())
    if role not in roles:
        raise UserError(f"'{checkpoint}' holds no {role}: it has {', '.join(roles)}")
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise UserError(f"'{out}' is not empty: give a new folder")
    try:
        config: Any = AutoConfig.from_pretrained(folder / MODEL_CONFIG_DIR, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UserError(
            f"'{folder}' is of a model with code of its own, which is not run from a checkpoint: go on from it with "
            f"the run's command and trainer.total_training_steps={step}, which writes huggingface/{role}"
        ) from error
    kind, auto = next((kind, auto) for end, kind, auto in _KINDS if config.architectures[0].endswith(end))
    if auto is None:
        auto = policy_class(config)
    else:
        register_classifier(auto, config, str(folder))
    hf = _empty(auto, folder, config)
    if (folder / MODEL_CONFIG_DIR / "generation_config.json").is_file():
        hf.generation_config = GenerationConfig.from_pretrained(folder / MODEL_CONFIG_DIR)
    model = kind(hf)
    engine_checkpoint.load(folder, model, None)
    export_hf(model, out, tokenizer=AutoTokenizer.from_pretrained(checkpoint / TOKENIZER_DIR))
    copy_processor(checkpoint / TOKENIZER_DIR, out)


def _empty(auto: Any, folder: Path, config: Any) -> Any:
    """A model to read the weights in `folder` into; for adapters, their base model with such adapters."""
    adapter_dir = folder / MODEL_CONFIG_DIR / ADAPTER_DIR
    if not (adapter_dir / CONFIG_FILE).is_file():
        return auto.from_config(config, dtype=torch.float32)
    adapter = read_adapter_config(adapter_dir)
    base = adapter.base_model_name_or_path
    try:
        with quiet_transformers():
            hf = auto.from_pretrained(base, config=config, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise UserError(f"'{folder}' holds adapters of '{base}', which cannot be loaded any more: {error}") from error
    inject(hf, adapter)
    return hf
