"""The root of the tree that `valor sft` reads."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt

from valor.config.base import PathList
from valor.config.data import Truncation
from valor.config.supervised import SupervisedConfig, SupervisedDataConfig
from valor.config.trainer import RunConfig


class SFTDataConfig(SupervisedDataConfig):
    """Demonstrations: chats, or pairs of prompt and response."""

    train_files: PathList = Field(default_factory=lambda: ["~/data/gsm8k_sft/train.parquet"])
    """Training demonstrations: one parquet or jsonl file, or a list."""
    val_files: PathList | None = None
    """Validation demonstrations; null measures no validation loss."""
    messages_key: str = "messages"
    """Column with the chat messages; where it is missing, prompt_key and response_key are read."""
    prompt_key: str = "prompt"
    """Column with the prompt (text or messages)."""
    response_key: str = "response"
    """Column with the response text."""
    truncation: Truncation = "error"
    """What happens to a longer sample: stop, or cut that part."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra arguments of the tokenizer's chat template."""


class SFTTrainerConfig(RunConfig):
    """The supervised run."""

    experiment_name: str = "sft"
    """Second part of the run's name."""
    total_epochs: PositiveInt = 4
    """Passes over the training samples."""


class SFTConfig(SupervisedConfig):
    """One run of supervised fine-tuning."""

    data: SFTDataConfig = SFTDataConfig()
    """Demonstrations."""
    trainer: SFTTrainerConfig = Field(default_factory=lambda: SFTTrainerConfig())
    """Length of the run, devices, logging, checkpoints."""
