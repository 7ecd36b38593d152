"""Everything a run reads before it starts: tokenizer, prompts, graders. Bad input is found here, nothing is written."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from valor import algorithms
from valor.config import PPOConfig, RewardConfig
from valor.data.batch import Batch
from valor.data.prompts import PromptDataset, PromptRow
from valor.data.sampler import PromptSampler
from valor.models.load import load_tokenizer
from valor.rewards.executor import RewardResult, Sample
from valor.rewards.manager import RewardManager


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
        dynamic = config.algorithm.filter_groups.enable
        at_once = data.gen_batch_size if dynamic and data.gen_batch_size else data.train_batch_size
        self.sampler = PromptSampler(len(self.train), at_once, seed=data.seed, shuffle=data.shuffle)
        self.rewards = RewardManager(config.reward)
        self.rewards.check({*self.train.data_sources, *(self.val.data_sources if self.val else ())})
        self._val_batch_size = data.val_batch_size
        trainer = config.trainer
        # Under dynamic sampling a step may draw more prompts than this: epochs then are a measure of the run's length.
        steps_per_epoch = max(len(self.train) // data.train_batch_size, 1)
        self.total_steps = trainer.total_training_steps or steps_per_epoch * trainer.total_epochs
        self._reward = config.reward

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

    def score(self, batch: Batch) -> list[RewardResult]:
        """What a batch's responses are worth in training: the grades, and the reward manager's penalties."""
        return with_overlong_penalty(self.grade(batch), batch["response_lengths"], self._reward)

    def grade(self, batch: Batch) -> list[RewardResult]:
        """The graders' verdicts on a batch's responses, in row order."""
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
        results, _ = self.rewards.score(samples)
        return results

    def close(self) -> None:
        """End the grader processes."""
        self.rewards.close()


def with_overlong_penalty(
    results: list[RewardResult], response_lengths: Tensor, reward: RewardConfig
) -> list[RewardResult]:
    """Under `reward_manager.name=dapo` with an overlong buffer: scores minus DAPO's soft penalty for length.

    The penalty is the component `overlong_reward` (0 or negative); whether an answer counts as right stays as it was.
    """
    buffer, longest = reward.reward_kwargs.overlong_buffer_cfg, reward.reward_kwargs.max_resp_len
    if reward.reward_manager.name != "dapo" or not buffer.enable:
        return results
    penalties = algorithms.overlong_penalty(
        response_lengths, max_response_length=longest, buffer_length=buffer.len, penalty_factor=buffer.penalty_factor
    )
    return [
        r._replace(score=r.score + p, components={"acc": r.correct, **r.components, "overlong_reward": p})
        for r, p in zip(results, penalties.tolist(), strict=True)
    ]
