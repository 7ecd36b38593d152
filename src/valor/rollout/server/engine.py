"""Generation by OpenAI-compatible servers that are running already: token ids there, token ids and log-probs back.

The servers live and die on their own, so every answer is taken with care: before it is told, its server is asked
whether it still holds the weights that it was sent. A vLLM server takes weights from files
(`valor.rollout.server.receiver` is its half); any other one keeps its own.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import cycle
from queue import Empty, SimpleQueue
from typing import Any

import httpx2
import torch.distributed as dist
from torch import Tensor

from valor.config import RolloutConfig
from valor.errors import TrainingStopped, WorkersReplaced
from valor.rollout.base import (
    Abort,
    Output,
    Request,
    RequestSource,
    RolloutEngine,
    UnderWay,
    WeightMode,
)
from valor.rollout.sampling import uniform_stream
from valor.rollout.server.connection import Connection, addresses, root
from valor.rollout.server.weights import Sent, Written, compare, held_by, new_name, send_weights, written

AS_TOKENS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
_POLL_SECONDS = 0.002  # between two looks for further requests
_ABORT_SECONDS = 0.1  # after which a request that has not ended is aborted again
_MOST_LOST = 10  # times that the connection may be lost in the middle of one request
_REMEMBERED = 100_000  # prompts and episodes whose server is known


class _ConnectionLost(Exception):
    """In the middle of a request; its server is there."""


@dataclass(slots=True, eq=False)
class _Asked(UnderWay):
    """A request for which `url` is asked, under `name`."""

    url: str
    name: str = ""
    sent: bool = False  # else it waits for one of `max_num_seqs` places
    ending: bool = False
    times_lost: int = 0
    reply: Future[Any] = field(default_factory=Future)


class ServerEngine(RolloutEngine):
    """Generates by asking servers; see `valor.rollout.base.RolloutEngine`.

    Every rank of the process group sends its own requests, samples of a prompt and turns of an episode to one server.
    `sync_weights` is collective: rank 0 writes and sends, the others have a part in gathering. With
    `weight_updates=none` there is no sync, and `weights_version` stays None. TrainingStopped, with the address, when a
    server does not do its part; WorkersReplaced, when it is there again but was started anew.
    """

    parallel_size = 1

    def __init__(self, config: RolloutConfig, *, eos_token_ids: Sequence[int]) -> None:
        self.weight_mode: WeightMode = "fixed" if config.server.weight_updates == "none" else "copied"
        self.weights_checksum: int | None = None
        self._version: int | None = None
        self._name: str | None = None  # of the weights that all servers hold
        self._config, self._server = config, config.server
        self._eos = frozenset(eos_token_ids)
        self._connection = Connection(config.server)
        self._asked: dict[str, _Asked] = {}
        self._replies: SimpleQueue[tuple[_Asked, Future[Any]]] = SimpleQueue()

    @property
    def weights_version(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The version that the servers hold, which are asked; None where one was started anew."""
        if self._version is not None:
            try:
                self._check_held(addresses(self._server))
            except WorkersReplaced:
                self._version = None
        return self._version

    def serve(self, source: RequestSource) -> None:
        """Have the servers generate what `source` has until it has no more."""
        if self._version is None and self.weight_mode == "copied":
            raise ValueError("the servers have no weights: sync_weights comes first")
        self._places = asyncio.Semaphore(self._config.max_num_seqs)
        self._urls, self._url_of = cycle(addresses(self._server)), {}
        with self._connection.opened():
            try:
                while (new := source.poll(wait=not self._asked)) is not None or self._asked:
                    for one in new or ():
                        if isinstance(one, Request):
                            self._send(_Asked(one, self._version or 0, self._server_of(one)))
                        else:
                            self._abort(one)
                    self._deliver()
            finally:
                for one in self._asked.values():
                    one.reply.cancel()
                self._asked.clear()

    def sync_weights(self, weights: Iterable[tuple[str, Tensor]] | None = None, *, version: int) -> None:
        """Replace the servers' weights in place.

        `weights`: all parameters, whole, under their Hugging Face names. TrainingStopped unless every worker of every
        server then holds exactly what was sent. Inside a source's `poll`, requests that have tokens go on with the keys
        and values that they have; others begin anew. WorkersReplaced there, when a server had been started anew before.
        """
        if weights is None:
            raise ValueError("servers have weights of their own: they must be given the policy's")
        before, self._version, self._name = self._name, None, None
        sent: list[Any] = [None]
        first = dist.get_rank() == 0
        with written(self._config, weights) if first else nullcontext(deque(weights, maxlen=0)) as files:
            # Writing takes a while, in which requests end: which ones, must be known right before the update.
            dist.barrier()
            ended = {name for name, one in self._asked.items() if one.reply.done()}
            dist.barrier()
            if isinstance(files, Written):
                sent = [send_weights(self._connection, self._config, files, version)]
            dist.broadcast_object_list(sent)  # nobody generates before the servers are ready
        told: Sent = sent[0]
        self._name, self.weights_checksum, self._version = told.name, told.checksum, version
        for url in {one.url for one in self._asked.values()}:
            compare(url, told.held[url], before)
        for one in [one for name, one in self._asked.items() if name not in ended]:
            if one.name in told.sampled:
                one.changed(told.sampled[one.name], version)
            else:
                self._begin_anew(one, version)

    def sleep(self) -> None:
        """The servers have devices of their own."""

    def close(self) -> None:
        """The servers are not ours to end."""

    # ---- requests

    def _server_of(self, request: Request) -> str:
        """Samples of one prompt go to one server, and so do all turns of an episode."""
        episode, turn = ("episode", *request.seed[:3]), request.seed[3:]
        if not turn or episode not in self._url_of:
            prompt = ("prompt", *request.prompt_ids)
            if prompt not in self._url_of:
                self._url_of[prompt] = next(self._urls)
            self._url_of[episode] = self._url_of[prompt]
        url = self._url_of[episode]
        while len(self._url_of) > _REMEMBERED:
            del self._url_of[next(iter(self._url_of))]
        return url

    def _send(self, asked: _Asked) -> None:
        asked.name, asked.sent = new_name(), False
        self._asked[asked.name] = asked
        with self._connection.opened() as portal:
            asked.reply = reply = portal.start_task_soon(self._complete, asked, self._body(asked))
        reply.add_done_callback(lambda done: self._replies.put((asked, done)))

    def _begin_anew(self, asked: _Asked, version: int) -> None:
        """All that it will have is to be sampled by weights of `version`."""
        old, asked.version = asked.reply, version
        asked.versions = UnderWay(asked.request, version).versions
        if asked.ending:
            asked.reply = Future()
            asked.reply.cancel()
            self._replies.put((asked, asked.reply))
        else:
            del self._asked[asked.name]
            self._send(asked)
        old.cancel()

    def _abort(self, wanted: Abort) -> None:
        for asked in self._asked.values():
            if asked.request.request_id == wanted.request_id and not asked.ending:
                asked.ending = True
                with self._connection.opened() as portal:
                    portal.start_task_soon(self._end, asked)

    async def _end(self, asked: _Asked) -> None:
        """Have the server end a request, which then replies with what it has; one that cannot is left alone.

        A request may be on its way to the server, and unknown there.
        """
        while asked.sent and not asked.reply.done():
            try:
                names = {"request_ids": [f"cmpl-{asked.name}-0"]}
                reply = await self._connection.client.post(f"{root(asked.url)}/abort_requests", json=names)
            except httpx2.TransportError:
                break
            if reply.status_code != 200:
                break
            await asyncio.sleep(_ABORT_SECONDS)
        asked.reply.cancel()

    async def _complete(self, asked: _Asked, body: dict[str, Any]) -> Any:
        async def check() -> None:
            compare(asked.url, await held_by(self._connection, asked.url), None)
            raise _ConnectionLost

        async with self._places:
            asked.sent = True
            lost = check if self.weight_mode == "copied" else None
            return await self._connection.post(f"{asked.url}/completions", body, lost=lost)

    def _deliver(self) -> None:
        """Tell what has ended. Waits a moment for that."""
        found: list[tuple[_Asked, Future[Any]]] = []
        with suppress(Empty):
            found.append(self._replies.get(timeout=_POLL_SECONDS))
            while True:
                found.append(self._replies.get_nowait())
        ended = [asked for asked, reply in found if reply is asked.reply and asked.name in self._asked]
        ended = [asked for asked in ended if not self._repeated(asked)]
        outputs = [_output(asked, None if asked.reply.cancelled() else asked.reply.result()) for asked in ended]
        if self.weight_mode == "copied":
            self._check_held({asked.url for asked in ended})
        for asked, output in zip(ended, outputs, strict=True):
            del self._asked[asked.name]
            if asked.request.on_finish is not None:
                asked.request.on_finish(output)

    def _repeated(self, asked: _Asked) -> bool:
        """Whether the connection was lost, so that the request begins anew."""
        if asked.reply.cancelled() or not isinstance(asked.reply.exception(), _ConnectionLost):
            return False
        asked.times_lost += 1
        if asked.times_lost > _MOST_LOST:
            raise TrainingStopped(f"the rollout server at {asked.url} breaks off the same request again and again")
        self._begin_anew(asked, self._version or 0)
        return True

    def _body(self, asked: _Asked) -> dict[str, Any]:
        """All that decides about sampling is said: what is left out, servers take from the model's files."""
        request, params = asked.request, asked.request.params
        begun = len(request.known_ids) - len(request.prompt_ids)
        return {
            "model": self._server.model,
            "prompt": list(request.known_ids),
            "max_tokens": params.max_tokens - begun,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k if params.top_k > 0 else -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": int(uniform_stream(request.seed, begun + 1)[begun] * 2**53),
            "stop_token_ids": sorted({*params.stop_token_ids} | (set() if params.ignore_eos else self._eos)),
            "ignore_eos": True,  # all that ends a sequence is named above
            **AS_TOKENS,
            "logprobs": 0,
            "request_id": asked.name,
            **({} if params.stop is None else {"stop": params.stop.texts, "include_stop_str_in_output": True}),
            # Cached keys and values are found only by prompts of the same weights.
            **({} if self._name is None else {"cache_salt": self._name}),
        }

    def _check_held(self, urls: Iterable[str]) -> None:
        with self._connection.opened() as portal:
            for url in urls:
                compare(url, portal.call(held_by, self._connection, url), self._name)


def _output(asked: _Asked, reply: Any) -> Output:
    """What came of a request. `reply` None: nothing, since it was aborted before, or its server cannot abort."""
    if reply is None:
        return asked.output([], [], "abort")
    try:
        choice = reply["choices"][0]
        tokens, given, reason = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
        log_probs = [math.nan if one is None else float(one) for one in given]
        if len(tokens) != len(log_probs) or reason not in ("stop", "length", "abort") or not (tokens or asked.ending):
            raise ValueError(f"{len(tokens)} tokens, {len(log_probs)} log-probs, finish reason {reason}")
    except (LookupError, TypeError, ValueError) as error:
        raise TrainingStopped(
            f"the reply of the rollout server at {asked.url} is no completion with token ids and log-probs: {error!r}"
        ) from None
    output = asked.output(tokens, log_probs, reason)
    most = asked.request.params.max_tokens
    if output.finish_reason == "length" and len(output.token_ids) < most:
        raise TrainingStopped(
            f"the rollout server at {asked.url} cut a response of up to {most} tokens at {len(output.token_ids)}: "
            "let it take responses as long as data.max_response_length (vLLM: --generation-config vllm)"
        )
    return output
