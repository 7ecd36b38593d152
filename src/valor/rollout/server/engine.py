"""Generation by servers: token ids there, token ids and log-probs back.

A reply is used only once its server is known to hold the weights of this run. What differs between vLLM, SGLang and
TensorRT-LLM is in their dialects.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast
from uuid import uuid4

import httpx2
import torch.distributed as dist
from torch import Tensor

from valor.config import RolloutConfig
from valor.errors import TrainingStopped, WorkersReplaced
from valor.rollout.base import Abort, FinishReason, Request, RequestSource, RolloutEngine, WeightMode
from valor.rollout.sampling import uniform_stream
from valor.rollout.server.client import ConnectionLost, ServerLeft
from valor.rollout.server.dialects import Completion, Reply, checked
from valor.rollout.server.fleet import Fleet, Update
from valor.rollout.server.launch import StartedServer
from valor.rollout.server.weights import WeightFiles, compare_names, written
from valor.tracking.progress import report_tokens

_POLL_SECONDS = 0.002  # between two looks for further requests
_ABORT_SECONDS = 0.1  # after which an abort is repeated
_MOST_LOSSES = 10  # unusable replies to one request


@dataclass(slots=True, eq=False)
class _InFlight:
    """A request that the server at `url` knows as `name`."""

    request: Request
    name: str = field(default_factory=lambda: f"valor-{uuid4().hex}")
    url: str = ""
    sent: bool = False  # False while it waits for one of `max_num_seqs` places
    ending: bool = False  # aborted by its source
    losses: int = 0
    reply: Future[Reply] = field(default_factory=Future)


class ServerEngine(RolloutEngine):
    """Generates by asking servers; see `valor.rollout.base.RolloutEngine`.

    Every rank of the process group sends its own requests, to any of the servers. The requests of a server that fails
    go to the others, and it gets the weights again when it returns. `sync_weights` is collective: rank 0 writes and
    sends, the others take part in gathering. With `weight_updates=none` `weights_version` stays None. TrainingStopped,
    with the address, when a server misbehaves; WorkersReplaced when the last one was restarted.
    """

    parallel_size = 1

    def __init__(
        self,
        config: RolloutConfig,
        *,
        eos_token_ids: Sequence[int],
        started: Sequence[StartedServer] = (),
        vocabulary: int | None = None,
        images: bool = False,
    ) -> None:
        self.weight_mode: WeightMode = "fixed" if config.server.weight_updates == "none" else "copied"
        self.weights_checksum: int | None = None
        self._version: int | None = None
        self._config, self._eos, self._vocabulary = config, frozenset(eos_token_ids), vocabulary
        self._fleet = Fleet(config, started, images)
        self._client, self._dialect = self._fleet.client, self._fleet.dialect
        self._in_flight: set[_InFlight] = set()

    @property
    def weights_version(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The version that the servers hold; None where one was restarted or returned."""
        if self._version is not None:
            try:
                self._fleet.check()
            except WorkersReplaced:
                self._version = None
        return self._version

    def serve(self, source: RequestSource) -> None:
        """Have the servers generate what `source` has until it has no more."""
        if self._version is None and self.weight_mode == "copied":
            raise ValueError("the servers have no weights: sync_weights comes first")
        self._places = asyncio.Semaphore(self._config.max_num_seqs)
        try:
            while (new := source.poll(wait=not self._in_flight)) is not None or self._in_flight:
                for event in new or ():
                    if isinstance(event, Request):
                        self._send(_InFlight(event))
                    else:
                        self._abort(event)
                self._deliver()
                self._fleet.look_after()
        finally:
            for flight in self._in_flight:
                flight.reply.cancel()
            self._in_flight.clear()

    def sync_weights(self, weights: Iterable[tuple[str, Tensor]] | None = None, *, version: int) -> None:
        """Replace the servers' weights in place, those of servers that returned too.

        `weights`: all parameters, unsharded, under their Hugging Face names. TrainingStopped unless every worker of
        every server that answers then holds exactly what was sent.
        """
        if weights is None:
            raise ValueError("servers have weights of their own: they must be given the policy's")
        self._version = None
        result: list[Any] = [None]
        first = dist.get_rank() == 0
        with written(self._config, weights) if first else nullcontext(deque(weights, maxlen=0)) as files:
            dist.barrier()  # no rank has requests in flight
            if isinstance(files, WeightFiles):
                result = [self._fleet.update(files, version)]
            dist.broadcast_object_list(result)  # no rank generates before the servers are ready
        update: Update = result[0]
        self.weights_checksum, self._version = update.checksum, version
        self._fleet.updated(update)

    def sleep(self) -> None:
        """Have servers on the trainer's devices release their memory, once all ranks have their samples."""
        if self._config.server.sleep:
            dist.barrier()
            if dist.get_rank() == 0:
                self._fleet.sleep()
            self._version = None

    def close(self) -> None:
        """Leave the servers awake, and end those that this process has started."""
        self._fleet.close()

    # ---- requests

    def _send(self, flight: _InFlight) -> None:
        self._in_flight.add(flight)
        flight.reply = self._client.submit(self._complete(flight))

    def _abort(self, abort: Abort) -> None:
        for flight in self._in_flight:
            if flight.request.request_id == abort.request_id and not flight.ending:
                flight.ending = True
                self._client.submit(self._end(flight))

    async def _end(self, flight: _InFlight) -> None:
        """Have the server end a request, which then replies with its tokens; else close the connection."""
        route = self._dialect.abort(flight.url, flight.name)
        while flight.sent and route is not None and not flight.reply.done():
            try:
                reply = await self._client.http.post(route[0], json=route[1])
            except httpx2.TransportError:
                break
            if reply.status_code != 200:
                break
            await asyncio.sleep(_ABORT_SECONDS)  # the request may still be on its way there
        flight.reply.cancel()

    async def _complete(self, flight: _InFlight) -> Reply:
        """The reply to a request; reason "lost": it has to be sent again."""
        if flight.ending:
            return Reply([], [], "abort")
        async with self._places:
            url = flight.url = self._fleet.choose(flight.request)
            flight.sent = True
            completion, copied = self._completion(flight), self.weight_mode == "copied"
            leave = partial(self._fleet.leave, url)
            try:
                body = self._dialect.body(completion)
                answer = await self._client.request(self._dialect.address(url), body, leave=leave, repeat=not copied)
                return self._read(flight, completion, answer)
            except ConnectionLost:  # was it restarted?
                compare_names(url, await self._dialect.held_weights(url), None)
                return Reply([], [], "lost")
            except ServerLeft:
                return Reply([], [], "lost")
            finally:
                self._fleet.load[url] -= 1

    def _deliver(self) -> None:
        """Pass on the replies that have come; waits a moment for them."""
        wait([flight.reply for flight in self._in_flight], _POLL_SECONDS, FIRST_COMPLETED)
        ended = [flight for flight in self._in_flight if flight.reply.done()]
        # A request that was aborted before it was sent, or whose server cannot abort, has no tokens.
        replies = [Reply([], [], "abort") if f.reply.cancelled() else f.reply.result() for f in ended]
        urls = {f.url for f, reply in zip(ended, replies, strict=True) if f.url and reply.reason != "lost"}
        holds = {url: self._fleet.holds(url) for url in urls if self.weight_mode == "copied"}
        for flight, reply in zip(ended, replies, strict=True):
            self._in_flight.remove(flight)
            lost = reply.reason == "lost" or not holds.get(flight.url, True)
            if not lost:
                report_tokens(len(reply.token_ids))
                reason = cast(FinishReason, reply.reason)
                output = flight.request.output(reply.token_ids, reply.log_probs, reason, self._version or 0)
                if output.finish_reason != "abort" or flight.ending:
                    if flight.request.on_finish is not None:
                        flight.request.on_finish(output)
                    continue
                flight.request = replace(flight.request, so_far=output)
            if lost or not reply.token_ids:
                flight.losses += 1
                if flight.losses > _MOST_LOSSES:
                    raise TrainingStopped(
                        f"the rollout server at {flight.url} breaks off the same request again and again, or "
                        "gives log-probs that are not finite: look for the cause in its log"
                    )
            self._send(_InFlight(flight.request, ending=flight.ending, losses=flight.losses))

    def _completion(self, flight: _InFlight) -> Completion:
        request, params = flight.request, flight.request.params
        begun = len(request.begun.token_ids)
        seed = int(uniform_stream(request.seed, begun + 1)[begun] * 2**53)
        ends = sorted({*params.stop_token_ids} | (set() if params.ignore_eos else self._eos))
        most, weights = params.max_tokens - begun, self._fleet.name or None
        return Completion([*request.known_ids], most, params, seed, ends, flight.name, weights, request.images)

    def _read(self, flight: _InFlight, completion: Completion, answer: Any) -> Reply:
        try:
            reply = self._dialect.read(answer)
        except (LookupError, TypeError, ValueError) as error:
            raise TrainingStopped(
                f"the reply of the rollout server at {flight.url} is no completion with token ids and log-probs: "
                f"{error!r}; take a release of it that docs/servers.md tells of"
            ) from None
        if flight.ending and not reply.token_ids:
            return Reply([], [], "abort")
        try:
            return checked(reply, completion, self._vocabulary)
        except ValueError as error:
            raise TrainingStopped(f"the rollout server at {flight.url} {error}") from None
