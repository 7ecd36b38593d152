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

from valor.tracking.progress import report_progress

FinishReason = Literal["stop", "length", "abort"]

WeightMode = Literal["shared", "copied", "fixed"]
"""shared: an engine generates with the parameters of the training engine beside it. copied: with a copy, written by
`sync_weights`. fixed: with weights that stay what they are."""


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
        return any(stop in text for stop in self.texts)


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

    `seed` and the token's index alone decide the random numbers: two requests with equal prompt, parameters and seed
    give equal samples wherever and beside whatever they run. `on_finish` is called with the output. `so_far`: output
    of an aborted request for the same sequence, which this one continues; its output then has the tokens of both.
    `images`: the file of what the prompt's image tokens stand for (`valor.data.images`).
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: tuple[int, ...] = (0,)
    on_finish: Callable[[Output], None] | None = field(default=None, compare=False)
    so_far: Output | None = field(default=None, compare=False)
    images: str = ""

    def __post_init__(self) -> None:
        if len(self.prompt_ids) == 0:
            raise ValueError(f"request {self.request_id!r} has an empty prompt")

    @property
    def known_ids(self) -> tuple[int, ...]:
        """The prompt and the tokens of `so_far`."""
        return (*self.prompt_ids, *self.begun.token_ids)

    @property
    def begun(self) -> Output:
        """`so_far`, or an empty output."""
        return self.so_far or Output(self.request_id, [], [], "abort")

    def output(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float],
        reason: FinishReason,
        version: int,
        routes: torch.Tensor | None = None,
    ) -> Output:
        """Tokens of `so_far` and new ones by weights of `version`, cut after the first complete stop text. `routes`: of
        all tokens but the last; those that `so_far` has remain."""
        begun, stop = self.begun, self.params.stop
        known, ids, log_probs = len(begun.token_ids), [*begun.token_ids, *ids], [*begun.log_probs, *log_probs]
        for end in range(known + 1, len(ids) + 1 if stop is not None else 0):
            if stop is not None and ids[end - 1] in stop.candidates and stop.complete(ids[:end]):
                ids, log_probs, reason = ids[:end], log_probs[:end], "stop"
                break
        versions = [*token_versions(begun.spans), *repeat(version, len(ids) - known)]
        if routes is not None:
            routes = routes[: len(self.prompt_ids) + len(ids) - 1]
            routes = routes if begun.routes is None else torch.cat([begun.routes, routes[len(begun.routes) :]])
        return Output(self.request_id, ids, log_probs, reason, spans_of(versions), routes)


@dataclass(frozen=True, slots=True)
class Abort:
    """End the request of this name now: its output has the tokens so far, and the finish reason "abort"."""

    request_id: str


class Span(NamedTuple):
    """Consecutive tokens that were sampled by the same weights."""

    num_tokens: int
    weights_version: int


def spans_of(token_versions: Iterable[int]) -> tuple[Span, ...]:
    """Spans of tokens, from the weights version of each."""
    return tuple(Span(len([*same]), version) for version, same in groupby(token_versions))


def token_versions(spans: Iterable[Span]) -> list[int]:
    """Weights version of each token."""
    return [*chain.from_iterable(repeat(span.weights_version, span.num_tokens) for span in spans)]


@dataclass(frozen=True, slots=True)
class Output:
    """Result of one request.

    `log_probs[t]` is the log-probability of `token_ids[t]` under softmax(logits / temperature) before top-k/top-p
    truncation (temperature 1 when greedy): the quantity a trainer recomputes. `finish_reason`: "stop" for an
    end-of-sequence or stop token, "length" for a limit on length, "abort" for a request that was cut off. `spans`:
    weights versions of the tokens, in order. `routes` [prompt and tokens less 1, C]: which experts were chosen
    (`valor.models.routing`), where an engine records it.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    spans: tuple[Span, ...] = ()
    routes: torch.Tensor | None = field(default=None, compare=False)


class RequestSource(Protocol):
    """Requests that come while others are being generated, such as the turns of episodes."""

    max_requests: int
    """Most requests at once."""
    max_tokens: int
    """Longest prompt plus response of any of them."""
    everywhere: bool
    """Whether each of the processes that generate together has a source with all the requests, or the first alone."""

    def poll(self, *, wait: bool) -> Sequence[Request | Abort] | None:
        """New requests and aborts since the last call; None: no more will come. `wait` blocks until either."""


class _AllAtOnce:
    """A source whose requests are all there from the start."""

    everywhere = True

    def __init__(self, requests: Sequence[Request] = ()) -> None:
        self._requests: Sequence[Request] = requests
        self.max_requests = len(requests)
        self.max_tokens = max((len(r.prompt_ids) + r.params.max_tokens for r in requests), default=0)

    def poll(self, *, wait: bool) -> Sequence[Request | Abort] | None:
        requests, self._requests = self._requests, ()
        return requests or None


class Elsewhere(_AllAtOnce):
    """Stands for a source that another of the processes that generate together has."""

    everywhere = False


@runtime_checkable
class RolloutEngine(Protocol):
    """A generation engine: native, or an adapter to an external one."""

    weight_mode: WeightMode
    parallel_size: int
    """Neighbouring processes that generate the same requests together (see `RequestSource.everywhere`)."""
    weights_version: int | None
    """The version that `generate` uses; None: `sync_weights` comes first, or the weights are fixed."""
    weights_checksum: int | None
    """Of all weights of an engine with a copy (`valor.rollout.transfer.checksum`)."""

    def serve(self, source: RequestSource) -> None:
        """Generate what `source` has until it has no more; each output goes to its request's `on_finish`."""

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Run all requests; outputs in the order of `requests`."""
        outputs: dict[int, Output] = {}

        def finish(index: int, output: Output) -> None:
            outputs[index] = output
            if (on_finish := requests[index].on_finish) is not None:
                on_finish(output)
            report_progress(len(outputs), len(requests))

        self.serve(_AllAtOnce([replace(r, on_finish=partial(finish, index)) for index, r in enumerate(requests)]))
        return [outputs[index] for index in range(len(requests))]

    def sync_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | None = None, *, version: int) -> None:
        """Make the next `generate` use the policy's weights of `version`; an engine that shares them takes None."""

    def sleep(self) -> None:
        """Release memory that only generation needs; `weights_version` is None where that includes the weights."""

    def close(self) -> None:
        """End the engine, where there is something to end."""
