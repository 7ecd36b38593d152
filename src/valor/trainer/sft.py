"""Supervised fine-tuning: the policy learns the assistant's tokens of given chats, on the engine and batch of PPO."""

from collections.abc import Sequence

from valor.config import SFTConfig
from valor.data.demonstrations import DemonstrationDataset
from valor.models.load import load_tokenizer
from valor.trainer.supervised import Samples, SupervisedRun
from valor.workers.host import RoleSpec
from valor.workers.sft import SFTWorker

ROLE = "actor"  # the policy's name in checkpoints and exports, as in a PPO run


class SFTRun(SupervisedRun):
    """The policy learns demonstrations."""

    role = ROLE
    title = "supervised training"
    unit = "tokens"
    config: SFTConfig

    def __init__(self, config: SFTConfig, command: str) -> None:
        model, data, seed = config.model, config.data, config.trainer.seed
        tokenizer = load_tokenizer(
            model.tokenizer_path or model.path,
            trust_remote_code=model.trust_remote_code,
            custom_chat_template=model.custom_chat_template,
            require_chat_template=True,
        )
        train = DemonstrationDataset(data, tokenizer, "train", seed)
        val = DemonstrationDataset(data, tokenizer, "val", seed) if data.val_files else None
        super().__init__(config, command, tokenizer, train, val)

    def evaluate(self, files: Sequence[str]) -> dict[str, float]:
        """`loss` and `token_accuracy` of the present weights on the demonstrations in these files."""
        data = self.config.data.model_copy(update={"val_files": list(files), "val_max_samples": -1})
        return self.measure(DemonstrationDataset(data, self.tokenizer, "val", self.config.trainer.seed))

    def role_spec(self) -> RoleSpec:
        return RoleSpec(SFTWorker, {"config": self.role_config, "total_steps": self.total_steps})

    def measure(self, samples: Samples) -> dict[str, float]:
        """`loss` and `token_accuracy`."""
        return self.roles[ROLE].evaluate(samples.batch(range(len(samples))))
