"""What the runs that learn from given texts have in common: `valor sft` and `valor rm train`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from valor.config.base import PathList, Section
from valor.config.engine import CheckpointConfig, FSDPConfig, OptimConfig
from valor.config.inheritance import fill_inherited
from valor.config.model import ModelConfig
from valor.config.trainer import RunConfig


class SupervisedDataConfig(Section):
    """Given texts; a sample is a row of the files."""

    train_files: PathList = Field(default_factory=list)
    """Training samples: one parquet or jsonl file, or a list."""
    val_files: PathList | None = None
    """Validation samples; null measures nothing."""
    train_max_samples: int = -1
    """Use only this many training samples; -1 all."""
    val_max_samples: int = -1
    """Use only this many validation samples; -1 all."""
    max_length: PositiveInt = 1024
    """Longest text in tokens."""
    train_batch_size: PositiveInt = 256
    """SAMPLES per optimizer step."""
    micro_batch_size_per_gpu: PositiveInt | None = None
    """Most samples in a micro-batch of one process; null leaves it to the token budget."""
    max_token_len_per_gpu: PositiveInt = 16384
    """Most tokens (padding included) in a micro-batch of one process."""
    shuffle: bool = True
    """Draw samples in random order, anew in each epoch."""


class SupervisedOptimConfig(OptimConfig):
    """Optimizer of supervised training."""

    lr: NonNegativeFloat = 1e-5
    """Peak learning rate."""


class SupervisedConfig(Section):
    """One run that learns from given texts."""

    model: ModelConfig = ModelConfig()
    """Network."""
    data: SupervisedDataConfig = SupervisedDataConfig()
    """Samples."""
    optim: SupervisedOptimConfig = SupervisedOptimConfig()
    """Optimizer."""
    fsdp_config: FSDPConfig = FSDPConfig()
    """Sharding, precision, offload."""
    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig())
    """Parts of a checkpoint."""
    trainer: RunConfig = Field(default_factory=lambda: RunConfig())
    """Length of the run, devices, logging, checkpoints."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        return fill_inherited(cls, data) if isinstance(data, dict) else data
