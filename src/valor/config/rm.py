"""The root of the tree that `valor rm train` reads."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveInt

from valor.config.base import PathList, Section, Share
from valor.config.supervised import SupervisedConfig, SupervisedDataConfig
from valor.config.trainer import RunConfig


class RMDataConfig(SupervisedDataConfig):
    """Preference pairs: a prompt with a better and a worse response; a sample is a pair."""

    train_files: PathList = Field(default_factory=lambda: ["~/data/ultrafeedback/train.parquet"])
    """Training pairs: one parquet or jsonl file, or a list."""
    val_files: PathList | None = None
    """Validation pairs; null holds out val_share of the training files."""
    val_share: Share = 0.1
    """Share of the prompts of each source to hold out; 0 holds out none."""
    prompt_key: str = "prompt"
    """Column with the prompt (text or messages); may be missing where the responses are whole chats."""
    chosen_key: str = "chosen"
    """Column with the better response (text, or messages that end with it)."""
    rejected_key: str = "rejected"
    """Column with the worse response."""
    source_key: str = "source"
    """Column by which accuracy is told apart; may be missing."""
    margin_key: str | None = None
    """Column with how much better the better response is; null takes loss.margin."""
    train_batch_size: PositiveInt = 64
    """PAIRS per optimizer step."""


class RMLossConfig(Section):
    """The Bradley-Terry loss, -log sigmoid(chosen - rejected - margin)."""

    margin: NonNegativeFloat = 0.0
    """By how much the better response has to win, in every pair (unless data.margin_key says it)."""
    center_coef: NonNegativeFloat = 0.0
    """Weight of the mean of (chosen + rejected)^2, which keeps scores around 0; 0.01 is usual."""


class RMTrainerConfig(RunConfig):
    """The reward model's run."""

    experiment_name: str = "rm"
    """Second part of the run's name."""
    total_epochs: PositiveInt = 1
    """Passes over the training pairs."""


class RMConfig(SupervisedConfig):
    """One run that trains a reward model from preference pairs."""

    data: RMDataConfig = RMDataConfig()
    """Preference pairs."""
    loss: RMLossConfig = RMLossConfig()
    """Loss."""
    trainer: RMTrainerConfig = Field(default_factory=lambda: RMTrainerConfig())
    """Length of the run, devices, logging, checkpoints."""
