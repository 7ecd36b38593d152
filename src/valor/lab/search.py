"""The critic at inference: which of a policy's answers to take.

Tokens are counted as they are spent: those that the policy samples, and those that the critic reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from valor.data.batch import Batch
from valor.data.reward_texts import text_rows
from valor.models.value import ValueModel
from valor.rollout.base import Request, RolloutEngine, SamplingParams

SEARCH_STREAM = -4  # second word of the key of a sample's random numbers, as in `collector.rollouts`


@dataclass
class Path:
    """A response so far: its tokens, whether it has ended, the critic's value of it."""

    ids: tuple[int, ...] = ()
    ended: bool = False
    value: float = 0.0


@dataclass
class Spent:
    """Tokens."""

    sampled: int = 0
    read: int = 0


class Searcher:
    """A policy's engine and a critic on prompts [P] of token ids. `params`: how the policy samples; `max_tokens` is the
    most of a response. All prompts advance together; what is drawn depends on the seed and the order of the calls."""

    def __init__(
        self,
        engine: RolloutEngine,
        critic: ValueModel,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        seed: int,
        most_read: int = 65536,
    ) -> None:
        self.engine, self.critic, self.prompts, self.seed = engine, critic, prompts, seed
        self.params = replace(params, ignore_eos=False)  # answers are to end
        self.spent, self._drawn, self._most_read = Spent(), 0, most_read

    def extend(self, paths: Sequence[tuple[int, Path]], tokens: int | None = None) -> list[Path]:
        """Each (prompt number, path) with up to `tokens` further ones (None: to its end), and its value."""
        limit, requests = self.params.max_tokens, []
        for prompt, path in paths:
            room = limit - len(path.ids)
            params = replace(self.params, max_tokens=room if tokens is None else min(tokens, room))
            key = (self.seed, SEARCH_STREAM, self._drawn)
            requests.append(Request(str(self._drawn), [*self.prompts[prompt], *path.ids], params, key))
            self._drawn += 1
        longer = []
        for (_, path), output in zip(paths, self.engine.generate(requests), strict=True):
            self.spent.sampled += len(output.token_ids)
            ids = (*path.ids, *output.token_ids)
            longer.append(Path(ids, output.finish_reason == "stop" or len(ids) >= limit))
        for path, value in zip(longer, self._values([p for p, _ in paths], longer), strict=True):
            path.value = value
        return longer

    def _values(self, prompts: Sequence[int], paths: Sequence[Path]) -> list[float]:
        """V of the state after each path; of an ended one V before its last token, the last that a critic learns."""
        values: list[float] = []
        longest = max(len(self.prompts[p]) + len(path.ids) for p, path in zip(prompts, paths, strict=True)) + 1
        at_once = max(1, self._most_read // longest)
        for start in range(0, len(paths), at_once):
            some = paths[start : start + at_once]
            of = [list(self.prompts[p]) for p in prompts[start : start + at_once]]
            # The state after a path is the one in which a further token would be chosen.
            rows: Batch = text_rows(of, [[*path.ids, *([] if path.ended else [0])] for path in some])
            self.spent.read += int(rows["prompt_lengths"].sum() + rows["response_lengths"].sum())
            with torch.inference_mode():
                output = self.critic(rows.tensors)["values"]
            last = rows["response_lengths"].to(output.device) - 1
            values += output.gather(1, last[:, None]).squeeze(1).tolist()
        return values

    def samples(self, number: int) -> list[list[Path]]:
        """`number` whole answers to each prompt."""
        paths = self.extend([(prompt, Path()) for prompt in range(len(self.prompts)) for _ in range(number)])
        return [paths[i : i + number] for i in range(0, len(paths), number)]


def choose(paths: Sequence[Path], answers: Sequence[str | None], how: str) -> int:
    """Which of the paths to take. best: the one of highest value; majority: one whose answer most of them have;
    weighted: one whose answer has the highest Σ of values. Votes: the first of the winner's paths, ties to the answer
    met first; paths without an answer do not vote."""
    if how == "best" or not any(answer is not None for answer in answers):
        return max(range(len(paths)), key=lambda i: paths[i].value)
    votes: dict[str, float] = defaultdict(float)
    for path, answer in zip(paths, answers, strict=True):
        if answer is not None:
            votes[answer] += 1.0 if how == "majority" else path.value
    return answers.index(max(votes, key=lambda answer: votes[answer]))
