"""The root of the tree that `valor sft` reads."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from valor.config.base import PathList, Section
from valor.config.data import Truncation
from valor.config.engine import CheckpointConfig, FSDPConfig, OptimConfig
from valor.config.inheritance import fill_inherited
from valor.config.model import ModelConfig
from valor.config.trainer import RunConfig


class SFTDataConfig(Section):
    """Demonstrations: chats, or pairs of prompt and response."""

    train_files: PathList = Field(default_factory=lambda: ["~/data/gsm8k_sft/train.parquet"])
    """Training demonstrations: one parquet or jsonl file, or a list."""
    val_files: PathList | None = None
    """Validation demonstrations; null measures no validation loss."""
    train_max_samples: int = -1
    """Use only this many training samples; -1 all."""
    val_max_samples: int = -1
    """Use only this many validation samples; -1 all."""
    messages_key: str = "messages"
    """Column with the chat messages; where it is missing, prompt_key and response_key are read."""
    prompt_key: str = "prompt"
    """Column with the prompt (text or messages)."""
    response_key: str = "response"
    """Column with the response text."""
    max_length: PositiveInt = 1024
    """Longest sample in tokens."""
    truncation: Truncation = "error"
    """What happens to a longer sample: stop, or cut that part."""
    train_batch_size: PositiveInt = 256
    """SAMPLES per optimizer step."""
    micro_batch_size_per_gpu: PositiveInt | None = None
    """Most samples in a micro-batch of one process; null leaves it to the token budget."""
    max_token_len_per_gpu: PositiveInt = 16384
    """Most tokens (padding included) in a micro-batch of one process."""
    shuffle: bool = True
    """Draw samples in random order, anew in each epoch."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra arguments of the tokenizer's chat template."""


class SFTOptimConfig(OptimConfig):
    """Optimizer of supervised training."""

    lr: NonNegativeFloat = 1e-5
    """Peak learning rate."""


class SFTTrainerConfig(RunConfig):
    """The supervised run."""

    experiment_name: str = "sft"
    """Second part of the run's name."""
    total_epochs: PositiveInt = 4
    """Passes over the training samples."""


class SFTConfig(Section):
    """One run of supervised fine-tuning."""

    model: ModelConfig = ModelConfig()
    """Network."""
    data: SFTDataConfig = SFTDataConfig()
    """Demonstrations."""
    optim: SFTOptimConfig = SFTOptimConfig()
    """Optimizer."""
    fsdp_config: FSDPConfig = FSDPConfig()
    """Sharding, precision, offload."""
    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig())
    """Parts of a checkpoint."""
    trainer: SFTTrainerConfig = Field(default_factory=lambda: SFTTrainerConfig())
    """Length of the run, devices, logging, checkpoints."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        return fill_inherited(cls, data) if isinstance(data, dict) else data
