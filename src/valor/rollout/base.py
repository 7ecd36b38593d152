"""The request-level interface behind which every generation engine stands.

An engine sees single sequences, never batches: n samples of a prompt are n requests with equal `prompt_ids`, a
turn of an episode is a request whose prompt is the conversation so far. Batching, prefix sharing and scheduling
are the engine's business, so the same caller drives the native engine, an external server or a multi-turn loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby, repeat
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch

from valor.tracking.progress import report_progress, report_tokens

FinishReason = Literal["stop", "length", "abort"]

WeightMode = Literal["shared", "copied", "fixed"]
"""shared: an engine generates with the parameters of the training engine beside it. copied: with a copy, written by
`sync_weights`. fixed: with weights of its own, whatever the policy learns."""


@dataclass(frozen=True, slots=True)
class StopTexts:
    """Texts that end a sequence; the token that completes one is its last.

    `candidates` are the tokens that may complete one, `decode` gives the text of token ids.
    """

    texts: tuple[str, ...]
    candidates: frozenset[int]
    decode: Callable[[Sequence[int]], str] = field(compare=False)

    def complete(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token completes one of the texts."""
        if not token_ids or token_ids[-1] not in self.candidates:
            return False
        tail = 4 * max(map(len, self.texts))  # a character has at most 4 bytes, a token at least one
        text = self.decode(token_ids[-tail:])
        return any(one in text for one in self.texts)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    `temperature` 0 is greedy. `top_k` <= 0 and `top_p` 1.0 switch that truncation off; with both on, top-p acts on
    the renormalised top-k distribution. `max_tokens` counts new tokens. A token of `stop_token_ids`, or the engine's
    end-of-sequence token unless `ignore_eos`, ends the sequence and is its last token; so does what completes a text of
    `stop`. Raises ValueError on values that have no meaning.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    stop: StopTexts | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p removes tokens from the distribution that is sampled from."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate.

    `seed` alone, with the token's index, decides the random numbers: two requests with equal prompt, parameters and
    seed give equal samples wherever and in whatever company they run. Vary one number of it to get another sample.
    `on_finish` is called with the output as soon as it is complete. `so_far`: what an earlier request for the same
    sequence had sampled when it was aborted; this one goes on behind it, and its output holds the whole.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: tuple[int, ...] = (0,)
    on_finish: Callable[[Output], None] | None = field(default=None, compare=False)
    so_far: Output | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if len(self.prompt_ids) == 0:
            raise ValueError(f"request {self.request_id!r} has an empty prompt")

    @property
    def known_ids(self) -> tuple[int, ...]:
        """The prompt and what has been sampled so far: the tokens that an engine begins with."""
        return (*self.prompt_ids, *self.begun.token_ids)

    @property
    def begun(self) -> Output:
        """`so_far`, or an empty output."""
        return self.so_far or Output(self.request_id, [], [], "abort")


@dataclass(frozen=True, slots=True)
class Abort:
    """End the request of this name now: its output is what it has, with the finish reason "abort"."""

    request_id: str


class Span(NamedTuple):
    """Consecutive tokens that were sampled by the same weights."""

    num_tokens: int
    weights_version: int


def spans_of(token_versions: Iterable[int]) -> tuple[Span, ...]:
    """The spans of tokens whose weights had these versions."""
    return tuple(Span(len([*same]), version) for version, same in groupby(token_versions))


def token_versions(spans: Iterable[Span]) -> list[int]:
    """Of each token the version of the weights that sampled it."""
    return [*chain.from_iterable(repeat(span.weights_version, span.num_tokens) for span in spans)]


@dataclass(frozen=True, slots=True)
class Output:
    """What became of one request.

    `log_probs[t]` is the log-probability of `token_ids[t]` under softmax(logits / temperature) before top-k/top-p
    truncation (temperature 1 when greedy): the quantity a trainer recomputes. `finish_reason`: "stop" for an
    end-of-sequence or stop token, "length" for a limit on length, "abort" for a request that was cut off. `spans`: the
    versions of the weights that sampled the tokens, in order.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    spans: tuple[Span, ...] = ()


@dataclass(slots=True, eq=False)
class UnderWay:
    """A request that is being generated, and which weights have sampled which of its tokens.

    `version`: of the weights that sample from now on. `versions`: of the tokens that it began with (`so_far`), and of
    those that earlier weights have sampled.
    """

    request: Request
    version: int
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = token_versions(self.request.begun.spans)

    def changed(self, num_new: int, version: int) -> None:
        """Weights of `version` sample from here on, behind `num_new` tokens that were not in `so_far`."""
        known = len(self.request.begun.token_ids) + num_new
        self.versions += [self.version] * (known - len(self.versions))
        self.version = version

    def output(self, new_ids: Sequence[int], new_log_probs: Sequence[float], reason: FinishReason) -> Output:
        """What became of it, with these tokens behind `so_far`; a stop text ends it where it is complete."""
        report_tokens(len(new_ids))
        had, stop = self.request.begun, self.request.params.stop
        ids, log_probs = [*had.token_ids, *new_ids], [*had.log_probs, *new_log_probs]
        if stop is not None:
            for end in range(len(had.token_ids) + 1, len(ids) + 1):
                if ids[end - 1] in stop.candidates and stop.complete(ids[:end]):
                    ids, log_probs, reason = ids[:end], log_probs[:end], "stop"
                    break
        versions = [*self.versions, *repeat(self.version, len(ids))][: len(ids)]
        return Output(self.request.request_id, ids, log_probs, reason, spans_of(versions))


class RequestSource(Protocol):
    """Requests that come while others are being generated, such as the turns of episodes.

    Inside `poll` the engine stands between two tokens: the source may give it other weights there (`sync_weights`),
    and requests under way go on with these behind the keys and values that they have.
    """

    max_requests: int
    """Most requests that are under way at once."""
    max_tokens: int
    """Longest prompt plus response of any of them."""
    everywhere: bool
    """Of processes that generate together: whether each has a source with all the requests, or the first one alone. The
    others are then polled when the first one's engine gets new weights, so that theirs get them too."""

    def poll(self, *, wait: bool) -> Sequence[Request | Abort] | None:
        """The requests that have come since the last call, and which of the earlier ones are to end; None: no more
        will come. `wait` blocks until either."""


class Elsewhere:
    """In place of a source where another of the processes that generate together has it."""

    max_requests = max_tokens = 0
    everywhere = False

    def poll(self, *, wait: bool) -> Sequence[Request | Abort] | None:
        return None


class _Given:
    """A source of requests that are all there from the start."""

    everywhere = True

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests: Sequence[Request] = requests
        self.max_requests = len(requests)
        self.max_tokens = max((len(one.prompt_ids) + one.params.max_tokens for one in requests), default=0)

    def poll(self, *, wait: bool) -> Sequence[Request | Abort] | None:
        requests, self._requests = self._requests, ()
        return requests or None


@runtime_checkable
class RolloutEngine(Protocol):
    """A generation engine: native, or an adapter to an external one."""

    weight_mode: WeightMode
    parallel_size: int
    """Neighbouring processes that generate together: all are given the same requests, or the first alone
    (`RequestSource.everywhere`)."""
    weights_version: int | None
    """The version that `generate` uses; None: it has none, `sync_weights` comes first (or they are fixed)."""
    weights_checksum: int | None
    """Of all weights that an engine with a copy of its own holds (`valor.rollout.transfer.checksum`)."""

    def serve(self, source: RequestSource) -> None:
        """Generate what `source` has until it has no more; each output goes to its request's `on_finish`."""

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Run all requests; outputs in the order of `requests`."""
        outputs: dict[int, Output] = {}

        def finish(place: int, output: Output) -> None:
            outputs[place] = output
            if (on_finish := requests[place].on_finish) is not None:
                on_finish(output)
            report_progress(len(outputs), len(requests))

        self.serve(_Given([replace(one, on_finish=partial(finish, place)) for place, one in enumerate(requests)]))
        return [outputs[place] for place in range(len(requests))]

    def sync_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | None = None, *, version: int) -> None:
        """Make the next `generate` use the policy's weights of `version`; an engine that shares them takes None."""

    def sleep(self) -> None:
        """Give back memory that generation alone needs, if it is kept between generations; `weights_version` is None
        where that includes the weights."""

    def close(self) -> None:
        """End the engine, where there is something to end."""
