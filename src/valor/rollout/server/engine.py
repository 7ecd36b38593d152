"""Generation by servers, OpenAI-compatible or SGLang's: token ids there, token ids and log-probs back.

The servers live and die on their own, so every answer is taken with care: before it is told, it is known that its
server holds the weights that it was sent. What servers of different makes do differently is in their dialects.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, cast
from uuid import uuid4

import httpx2
import torch.distributed as dist
from torch import Tensor

from valor.config import RolloutConfig
from valor.errors import TrainingStopped, WorkersReplaced
from valor.rollout.base import Abort, FinishReason, Request, RequestSource, RolloutEngine, UnderWay, WeightMode
from valor.rollout.sampling import uniform_stream
from valor.rollout.server.connection import Away
from valor.rollout.server.dialects import Ask, Reply, Written, checked
from valor.rollout.server.fleet import Fleet
from valor.rollout.server.launch import StartedServer
from valor.rollout.server.weights import Sent, compare, send_weights, written

_POLL_SECONDS = 0.002  # between two looks for further requests
_ABORT_SECONDS = 0.1  # after which a request that has not ended is aborted again
_MOST_LOST = 10  # times that the connection may be lost in the middle of one request


@dataclass(slots=True, eq=False)
class _Asked(UnderWay):
    """A request for which `url` is asked, under `name`, since weights of version `since` were there."""

    url: str = ""
    name: str = ""
    since: int = 0
    sent: bool = False  # else it waits for one of `max_num_seqs` places
    ending: bool = False
    times_lost: int = 0
    reply: Future[Reply] = field(default_factory=Future)


class ServerEngine(RolloutEngine):
    """Generates by asking servers; see `valor.rollout.base.RolloutEngine`.

    Every rank of the process group sends its own requests, to any of the servers. One that goes away is left out, as
    long as there is another one, and its requests go to those; when it is there again it gets the weights first.
    `sync_weights` is collective: rank 0 writes and sends, the others have a part in gathering. With
    `weight_updates=none` there is no sync, and `weights_version` stays None. TrainingStopped, with the address, when a
    server does not do its part; WorkersReplaced, when the last one is there again but was started anew.
    """

    parallel_size = 1

    def __init__(
        self,
        config: RolloutConfig,
        *,
        eos_token_ids: Sequence[int],
        started: Sequence[StartedServer] = (),
        vocabulary: int | None = None,
    ) -> None:
        self.weight_mode: WeightMode = "fixed" if config.server.weight_updates == "none" else "copied"
        self.weights_checksum: int | None = None
        self._version: int | None = None
        self._config, self._eos, self._vocabulary = config, frozenset(eos_token_ids), vocabulary
        self._fleet = Fleet(config, started)
        self._connection, self._dialect = self._fleet.connection, self._fleet.dialect
        self._asked: dict[str, _Asked] = {}
        self._replies: SimpleQueue[tuple[_Asked, Future[Reply]]] = SimpleQueue()

    @property
    def weights_version(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The version that the servers hold; None where one was started anew, or is there again."""
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
        with self._connection.opened():
            self._fleet.wake()
            try:
                while (new := source.poll(wait=not self._asked)) is not None or self._asked:
                    for one in new or ():
                        if isinstance(one, Request):
                            self._send(_Asked(one, self._version or 0))
                        else:
                            self._abort(one)
                    self._deliver()
                    self._fleet.look_after()
            finally:
                for one in self._asked.values():
                    one.reply.cancel()
                self._asked.clear()

    def sync_weights(self, weights: Iterable[tuple[str, Tensor]] | None = None, *, version: int) -> None:
        """Replace the servers' weights in place, those of servers that were left out and answer again too.

        `weights`: all parameters, whole, under their Hugging Face names. TrainingStopped unless every worker of every
        server that is there then holds exactly what was sent. Inside a source's `poll`, requests that have tokens go on
        (vLLM's with the keys and values that they have); others begin anew, and so do those of servers that had been
        started anew before.
        """
        if weights is None:
            raise ValueError("servers have weights of their own: they must be given the policy's")
        before, self._version = self._fleet.name, None
        sent: list[Any] = [None]
        first = dist.get_rank() == 0
        with written(self._config, weights) if first else nullcontext(deque(weights, maxlen=0)) as files:
            # Writing takes a while, in which requests end: which ones, must be known right before the update.
            dist.barrier()
            ended = {name for name, one in self._asked.items() if one.reply.done()}
            dist.barrier()
            if isinstance(files, Written):
                back = self._fleet.look()
                urls = [*self._fleet.present, *back]
                sent = [send_weights(self._dialect, urls, files, version, self._fleet.leave)]
            dist.broadcast_object_list(sent)  # nobody generates before the servers are ready
        told: Sent = sent[0]
        self.weights_checksum, self._version = told.checksum, version
        self._fleet.have(told, version)
        anew = set()
        for url in {one.url for one in self._asked.values() if one.url in told.held}:
            try:
                compare(url, told.held[url], before)
            except WorkersReplaced:
                anew.add(url)
        for one in [one for name, one in self._asked.items() if name not in ended]:
            if one.url in anew or one.url in self._fleet.out:
                self._begin_anew(one, version)
            elif one.name in told.sampled:
                one.changed(told.sampled[one.name], version)
            elif not self._dialect.tells_weights:
                self._begin_anew(one, version)

    def sleep(self) -> None:
        """Have servers that share the trainer's devices give their memory back, when all ranks have their samples."""
        if self._config.server.sleep:
            dist.barrier()
            self._fleet.sleep(first=dist.get_rank() == 0)
            self._version = None

    def close(self) -> None:
        """Leave the servers awake, and end those that this process has started."""
        self._fleet.close()

    # ---- requests

    def _send(self, asked: _Asked) -> None:
        asked.name, asked.sent = f"valor-{uuid4().hex}", False
        self._asked[asked.name] = asked
        with self._connection.opened() as portal:
            asked.reply = reply = portal.start_task_soon(self._complete, asked)
        reply.add_done_callback(lambda done: self._replies.put((asked, done)))

    def _begin_anew(self, asked: _Asked, version: int) -> None:
        """All that it will have is to be sampled by weights of `version`."""
        old, asked.version, asked.url = asked.reply, version, ""
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
        ends = self._dialect.abort(asked.url, asked.name)
        while asked.sent and ends is not None and not asked.reply.done():
            try:
                reply = await self._connection.client.post(ends[0], json=ends[1])
            except httpx2.TransportError:
                break
            if reply.status_code != 200:
                break
            await asyncio.sleep(_ABORT_SECONDS)
        asked.reply.cancel()

    async def _complete(self, asked: _Asked) -> Reply:
        """Its reply; a "lost" one cannot be used: it is asked for anew."""

        async def check() -> None:
            compare(asked.url, await self._dialect.held(asked.url), None)
            raise Away

        async with self._places:
            url = asked.url = self._fleet.choose(asked.request)
            asked.since, asked.sent = self._fleet.versions.get(self._fleet.name, 0), True
            try:
                lost = check if self.weight_mode == "copied" else None
                leave = partial(self._fleet.leave, url)
                at, ask = self._dialect.address(url), self._ask(asked)
                told = await self._connection.ask(at, self._dialect.body(ask), lost=lost, leave=leave)
                return self._read(asked, ask, told)
            except Away:
                return Reply([], [], "lost")
            finally:
                self._fleet.load[url] -= 1

    def _deliver(self) -> None:
        """Tell what has ended. Waits a moment for that."""
        found: list[tuple[_Asked, Future[Reply]]] = []
        with suppress(Empty):
            found.append(self._replies.get(timeout=_POLL_SECONDS))
            while True:
                found.append(self._replies.get_nowait())
        ended = [asked for asked, reply in found if reply is asked.reply and asked.name in self._asked]
        # One that was aborted before it was asked for, or whose server cannot abort, has nothing.
        replies = [Reply([], [], "abort") if asked.reply.cancelled() else asked.reply.result() for asked in ended]
        doubtful = self.weight_mode == "copied" and not self._dialect.tells_weights  # by which weights answers are
        urls = {asked.url for asked, reply in zip(ended, replies, strict=True) if asked.url and reply.reason != "lost"}
        true = {url: self._fleet.holds(url) for url in urls if doubtful}
        for asked, reply in zip(ended, replies, strict=True):
            cut = reply.reason == "lost" or (reply.reason == "abort" and not asked.ending)
            if cut or not true.get(asked.url, True) or not self._by_ours(asked, reply):
                asked.times_lost += 1
                if asked.times_lost > _MOST_LOST:
                    raise TrainingStopped(
                        f"the rollout server at {asked.url} breaks off the same request again and again, or "
                        "gives log-probs that are not finite: look for the cause in its log"
                    )
                self._begin_anew(asked, self._version or 0)
                continue
            del self._asked[asked.name]
            output = asked.output(reply.token_ids, reply.log_probs, cast(FinishReason, reply.reason))
            if asked.request.on_finish is not None:
                asked.request.on_finish(output)

    def _by_ours(self, asked: _Asked, reply: Reply) -> bool:
        """Take down which weights have sampled which tokens, where the reply says it; False: none that were sent.

        TrainingStopped when they are another run's, or older than those that were there when it was asked for.
        """
        if reply.weights is None or self.weight_mode == "fixed":
            return True
        if None in reply.weights:
            if not self._fleet.leave(asked.url):
                compare(asked.url, [None], None)
            return False
        compare(asked.url, [name for name in reply.weights if name not in self._fleet.versions], self._fleet.name)
        versions = [self._fleet.versions[str(name)] for name in reply.weights]
        if versions and (min(versions) < asked.since or versions != sorted(versions)):
            raise TrainingStopped(
                f"the rollout server at {asked.url} answers with weights {min(versions)}, and {asked.since} were sent: "
                "its samples are stale"
            )
        asked.versions += versions
        return True

    def _ask(self, asked: _Asked) -> Ask:
        request, params = asked.request, asked.request.params
        begun = len(request.begun.token_ids)
        seed = int(uniform_stream(request.seed, begun + 1)[begun] * 2**53)
        ends = sorted({*params.stop_token_ids} | (set() if params.ignore_eos else self._eos))
        most = params.max_tokens - begun
        weights = self._fleet.name or None
        return Ask([*request.known_ids], most, params, seed, ends, asked.name, weights)

    def _read(self, asked: _Asked, ask: Ask, told: Any) -> Reply:
        try:
            reply = self._dialect.read(told)
        except (LookupError, TypeError, ValueError) as error:
            raise TrainingStopped(
                f"the reply of the rollout server at {asked.url} is no completion with token ids and log-probs: "
                f"{error!r}; take a release of it that docs/servers.md tells of"
            ) from None
        if asked.ending and not reply.token_ids:
            return reply
        try:
            return checked(reply, ask, self._vocabulary)
        except ValueError as error:
            raise TrainingStopped(f"the rollout server at {asked.url} {error}") from None
