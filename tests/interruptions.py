"""Requests that are aborted, go on, and get other weights, for every engine."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from valor.rollout.base import Abort, Output, Request, RolloutEngine

Then = Callable[[], Sequence[Request | Abort]]


class Scripted:
    """A source that hands out `asked`, then what `then` gives, then waits for what is under way.

    `at`: the number of the poll that gives it, or the name of one of `asked` whose output it waits for.
    """

    everywhere = True

    def __init__(self, asked: Sequence[Request], then: Then, *, at: int | str = 4) -> None:
        self.outputs: dict[str, Output] = {}
        self._asked = [self._taken(one) for one in asked]
        self._then, self._at, self._polls = then, at, 0
        self._given = False
        self.max_requests, self.max_tokens = 8, 128

    def _taken(self, one: Request | Abort) -> Request | Abort:
        return replace(one, on_finish=self._take) if isinstance(one, Request) else one

    def _take(self, output: Output) -> None:
        self.outputs[output.request_id] = output

    def poll(self, *, wait: bool) -> Sequence[Request | Abort] | None:
        self._polls += 1
        if self._polls == 1:
            return self._asked
        if not self._given and (self._at in self.outputs or self._polls == self._at):
            self._given = True
            more = [self._taken(one) for one in self._then()]
            self._asked += [one for one in more if isinstance(one, Request)]
            return more
        return None if len(self.outputs) >= len(self._asked) else []


def served(engine: RolloutEngine, asked: Sequence[Request], then: Then, *, at: int | str = 4) -> list[Output]:
    """The outputs of `asked`, then of what `then` has asked for."""
    source = Scripted(asked, then, at=at)
    engine.serve(source)
    return [source.outputs[one.request_id] for one in source._asked if isinstance(one, Request)]


def aborted(requests: Sequence[Request]) -> Then:
    return lambda: [Abort(one.request_id) for one in requests]


def resumed(requests: Sequence[Request], had: Sequence[Output]) -> list[Request]:
    return [replace(one, so_far=output) for one, output in zip(requests, had, strict=True)]


def teacher_forced(model: PreTrainedModel, request: Request, output: Output) -> torch.Tensor:
    """Log-probs of the output's tokens from one forward over the whole sequence."""
    ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / (request.params.temperature or 1.0)
    return logits.log_softmax(-1).gather(1, ids[0, len(request.prompt_ids) :, None]).squeeze(1)


def assert_log_probs(output: Output, expected: torch.Tensor, atol: float) -> None:
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=atol)
