"""The trees of runs that learn from given texts: `valor sft` and `valor rm train`."""

from pydantic import NonNegativeFloat, PositiveInt

from valor.config.base import Section, Share, key, section
from valor.config.data import FilesConfig, Truncation
from valor.config.engine import CheckpointConfig, FastOptimConfig, FSDPConfig, ModelConfig
from valor.config.trainer import RunConfig


class SupervisedDataConfig(FilesConfig):
    """Given texts; a sample is a row of the files."""

    max_length: PositiveInt = 1024
    """Longest text in tokens."""
    train_batch_size: PositiveInt = 256
    """SAMPLES per optimizer step."""
    micro_batch_size_per_gpu: PositiveInt | None = None
    """Most samples in a micro-batch of one process; null leaves it to the token budget."""
    max_token_len_per_gpu: PositiveInt = 16384
    """Most tokens (padding included) in a micro-batch of one process."""


class SupervisedConfig(Section):
    """One run that learns from given texts."""

    model: ModelConfig = section(ModelConfig)
    data: SupervisedDataConfig = section(SupervisedDataConfig)
    optim: FastOptimConfig = section(FastOptimConfig)
    fsdp_config: FSDPConfig = section(FSDPConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    trainer: RunConfig = section(RunConfig)


class SFTDataConfig(SupervisedDataConfig, train_files=["~/data/gsm8k_sft/train.parquet"]):
    """Demonstrations: chats, or pairs of prompt and response."""

    messages_key: str = "messages"
    """Column with the chat messages; where it is missing, prompt_key and response_key are read."""
    response_key: str = "response"
    """Column with the response."""
    truncation: Truncation = "error"
    """What happens to a longer sample: stop, or cut that part."""


class SFTTrainerConfig(RunConfig, experiment_name="sft", total_epochs=4):
    """The supervised run."""


class SFTConfig(SupervisedConfig):
    """One run of supervised fine-tuning."""

    data: SFTDataConfig = section(SFTDataConfig)
    trainer: SFTTrainerConfig = section(SFTTrainerConfig)


class RMDataConfig(SupervisedDataConfig, train_files=["~/data/ultrafeedback/train.parquet"], train_batch_size=64):
    """Preference pairs: a prompt with a better and a worse response; a sample is a pair."""

    val_share: Share = key(0.1, {".val_files=null": "data.val_files has the validation rows"})
    """Share of the prompts of each source to hold out; 0 holds out none."""
    chosen_key: str = "chosen"
    """Column with the better response (text, or messages that end with it)."""
    rejected_key: str = "rejected"
    """Column with the worse response."""
    margin_key: str | None = "margin"
    """Column with how much better the better response is. Rows without one take loss.margin; null leaves it unread."""


class RMLossConfig(Section):
    """The Bradley-Terry loss, -log sigmoid(chosen - rejected - margin)."""

    margin: NonNegativeFloat = 0.0
    """By how much the better response has to win, in every pair (unless the column data.margin_key says it)."""
    center_coef: NonNegativeFloat = 0.0
    """Weight of the mean of (chosen + rejected)^2, which keeps scores around 0; 0.01 is usual."""


class RMTrainerConfig(RunConfig, experiment_name="rm", total_epochs=1):
    """The reward model's run."""


class RMConfig(SupervisedConfig):
    """One run that trains a reward model from preference pairs."""

    data: RMDataConfig = section(RMDataConfig)
    loss: RMLossConfig = section(RMLossConfig)
    trainer: RMTrainerConfig = section(RMTrainerConfig)
