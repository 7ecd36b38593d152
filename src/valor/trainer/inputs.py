"""Everything a run reads before it starts: tokenizer, prompts, graders. Bad input is found here, nothing is written."""

from __future__ import annotations

from collections.abc import Iterator

from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.data.prompts import PromptDataset, PromptRow
from valor.data.sampler import PromptSampler
from valor.models.load import load_tokenizer
from valor.rewards.executor import RewardResult, Sample
from valor.rewards.manager import RewardManager, ScoreSummary


class RunInputs:
    """Tokenizer, data sets, sampler and graders of a run."""

    def __init__(self, config: PPOConfig) -> None:
        model, data = config.actor_rollout_ref.model, config.data
        self.tokenizer = load_tokenizer(
            data.tokenizer or model.tokenizer_path or model.path,
            trust_remote_code=model.trust_remote_code,
            custom_chat_template=model.custom_chat_template,
            require_chat_template=True,
        )
        self.train = PromptDataset(data, self.tokenizer, split="train")
        self.val = PromptDataset(data, self.tokenizer, split="val") if data.val_files else None
        self.sampler = PromptSampler(len(self.train), data.train_batch_size, seed=data.seed, shuffle=data.shuffle)
        self.rewards = RewardManager(config.reward)
        self.rewards.check({*self.train.data_sources, *(self.val.data_sources if self.val else ())})
        self._val_batch_size = data.val_batch_size
        trainer = config.trainer
        self.total_steps = trainer.total_training_steps or self.sampler.steps_per_epoch * trainer.total_epochs

    @property
    def eos_token_ids(self) -> list[int]:
        return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]

    def validation_chunks(self) -> Iterator[list[PromptRow]]:
        """The validation prompts in pieces of `data.val_batch_size` (one piece when that is null)."""
        rows = list(self.val) if self.val is not None else []
        size = self._val_batch_size or len(rows)
        for start in range(0, len(rows), max(size, 1)):
            yield rows[start : start + size]

    def with_text(self, batch: Batch) -> Batch:
        """The batch with `response_text`, decoded without special tokens."""
        ids = [row[:n] for row, n in zip(batch["responses"].tolist(), batch["response_lengths"].tolist(), strict=True)]
        batch.objects["response_text"] = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return batch

    def score(self, batch: Batch) -> tuple[list[RewardResult], ScoreSummary]:
        """Grades of a batch's responses, in row order, and their summary."""
        columns = batch.objects
        samples = [
            Sample(source, text, truth, extra)
            for source, text, truth, extra in zip(
                columns["data_source"],
                columns["response_text"],
                columns["ground_truth"],
                columns["extra_info"],
                strict=True,
            )
        ]
        return self.rewards.score(samples)

    def close(self) -> None:
        """End the grader processes."""
        self.rewards.close()
