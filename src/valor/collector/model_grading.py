"""What a learned reward model, a process reward model, a judge or a prover says of responses."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from valor import algorithms
from valor.agents.episode import own_words
from valor.collector.inputs import RunInputs
from valor.config import PPOConfig
from valor.controller.group import Pools
from valor.data.batch import Batch, unpadded
from valor.data.messages import Messages
from valor.data.reward_texts import CriticTexts, prompt_text
from valor.rewards.judge import Question
from valor.rewards.steps import Place, last_token, split_steps
from valor.rewards.worker import RewardResult
from valor.tracking.progress import phase


class ModelGrading:
    """The part of grading that `reward.reward_model` asks for."""

    def __init__(self, config: PPOConfig, inputs: RunInputs, roles: Pools) -> None:
        self.config, self.inputs, self.roles = config.reward, inputs, roles

    def grades(self, batch: Batch) -> list[RewardResult]:
        """Scores with the component `rm_score`; from a model here also `rm_cut`, whether the text had to be cut."""
        if self.inputs.judge is not None:
            columns = batch.objects
            names = ("ground_truth", "response_text")
            texts = zip(columns["messages"], own_words(batch), *(columns[name] for name in names), strict=True)
            with phase("judge", len(batch), unit="sample"):
                results = self.inputs.judge.score([Question(prompt_text(first), *rest) for first, *rest in texts])
            return [r._replace(components={"rm_score": r.score}) if r.error is None else r for r in results]
        assert self.inputs.reward_texts is not None, "the reward model has its tokenizer"
        rows, cut = self.inputs.reward_texts.rows(batch)
        with phase("reward model", len(batch), unit="sample"):
            outputs = self.roles["reward_model"].score(rows)
        if "values" in outputs:
            columns = zip(outputs["values"], self._steps(batch, rows), rows["response_lengths"].tolist(), strict=True)
            results = [self._of_steps(*row) for row in columns]
        else:
            results = [self._result(score, ()) for score in outputs["scores"].tolist()]
        return [
            r._replace(components={**r.components, "rm_cut": was_cut}) if r.error is None else r
            for r, was_cut in zip(results, cut, strict=True)
        ]

    def progress(self, batch: Batch) -> Tensor:
        """`weight` times what the step of each token has added to the prover's value, [R, T]."""
        mask = batch["response_mask"]
        assert self.inputs.reward_texts is not None, "the prover has its tokenizer"
        rows, _ = self.inputs.reward_texts.rows(batch)
        with phase("prover", len(batch), unit="sample"):
            values = self.roles["reward_model"].score(rows)["values"]
        values = functional.pad(values, (0, mask.shape[1]))[:, : mask.shape[1]]
        step_ids = torch.ones_like(mask, dtype=torch.long)
        for ids, steps in zip(step_ids, self._steps(batch, rows), strict=True):
            for _, last in steps:
                ids[last + 1 :] += 1
        return self.config.reward_model.weight * algorithms.progress(values, step_ids, mask)

    def _of_steps(self, values: Tensor, steps: list[tuple[Place, int]], length: int) -> RewardResult:
        """The values [T + 1] after the steps' last tokens, as rewards of the steps; their mean is `rm_score`."""
        texts = self.inputs.reward_texts
        # A critic was not made to be read behind the last token.
        most = length if isinstance(texts, CriticTexts) and texts.reads_end else length - 1
        scores = [float(values[min(last + 1, most)]) for _, last in steps]
        places = [place for place, _ in steps]
        mean = math.fsum(scores) / max(len(scores), 1)
        result = self._result(mean, tuple(zip(places, scores, strict=True)))
        return result._replace(score=0.0) if result.error is None else result

    def _result(self, score: float, steps: tuple[tuple[Place, float], ...]) -> RewardResult:
        if not math.isfinite(score):
            return RewardResult(self.config.error_score, {}, f"the reward model gave {score}")
        return RewardResult(score, {"rm_score": score}, steps=steps)

    def _steps(self, batch: Batch, rows: Batch) -> list[list[tuple[Place, int]]]:
        """The steps of each response: their places, and their last tokens in `rows`."""
        columns = (batch.objects[name] for name in ("messages", "template_kwargs", "response_text"))
        return [self._steps_of(*row) for row in zip(*columns, unpadded(rows, "response"), strict=True)]

    def _steps_of(
        self, messages: Messages, kwargs: Mapping[str, Any], text: str, ids: list[int]
    ) -> list[tuple[Place, int]]:
        texts, separator = self.inputs.reward_texts, self.config.reward_model.step_separator
        if separator is None:
            return [(token, token) for token in range(len(ids))]
        assert isinstance(texts, CriticTexts), "it reads tokens"
        starts, spans = texts.token_starts(messages, text, kwargs), split_steps(text, separator)
        if starts is not None:
            return [(span, sum(start < span[1] for start in starts) - 1) for span in spans]
        return [(span, last_token(span[1], ids, text, self.decode)) for span in spans]

    def decode(self, ids: Sequence[int]) -> str:
        return self.inputs.decode([list(ids)])[0]
