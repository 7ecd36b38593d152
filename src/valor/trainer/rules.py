"""Responses graded by rule: each as soon as it is finished, while others are still being generated."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from valor.data.batch import Batch
from valor.rewards.worker import RewardResult, Sample, gather
from valor.rollout.finished import Finished, listening
from valor.trainer.inputs import RunInputs

_Row = tuple[str, int]  # uid of the prompt, number of the sample: what a row is known by


class Rules:
    """The graders' verdicts on batches. What was heard `ahead` is not graded again."""

    def __init__(self, inputs: RunInputs) -> None:
        self._inputs, self._rewards = inputs, inputs.rewards
        self._early: dict[_Row, tuple[str, Future[RewardResult]]] = {}

    @contextmanager
    def ahead(self, prompts: Batch) -> Iterator[None]:
        """Inside the block responses to `prompts` are generated; those that have a grader go to it at once."""
        if not self._rewards.one_by_one:
            yield
            return
        places = {tuple(key): i for i, key in enumerate(prompts["sample_key"].tolist())}
        rows, columns = _rows(prompts), prompts.objects

        def grade(response: Finished) -> None:
            i = places[response.key]
            source = columns["data_source"][i]
            if rows[i] not in self._early and self._inputs.has_grader(source):
                text = self._inputs.decode([response.token_ids])[0]
                sample = Sample(source, text, columns["ground_truth"][i], columns["extra_info"][i])
                self._early[rows[i]] = text, self._rewards.submit_all([sample])[0]

        with listening(grade):
            yield

    def grade(self, batch: Batch) -> list[RewardResult]:
        """The verdicts on a batch's responses, in row order."""
        names = "data_source", "response_text", "ground_truth", "extra_info"
        samples = [Sample(*row) for row in zip(*(batch.objects[name] for name in names), strict=True)]
        rows = _rows(batch) if "sample_key" in batch else []
        futures: dict[int, Future[RewardResult]] = {}
        for i, row in enumerate(rows):
            text, future = self._early.pop(row, (None, None))
            if future is not None and text == samples[i].solution_str:
                futures[i] = future
        rest = [i for i in range(len(batch)) if i not in futures]
        futures |= zip(rest, self._rewards.submit_all([samples[i] for i in rest]), strict=True)
        return gather([futures[i] for i in range(len(batch))])


def _rows(batch: Batch) -> list[_Row]:
    return list(zip(batch.objects["uid"], batch["sample_key"][:, -1].tolist(), strict=True))
