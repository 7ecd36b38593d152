"""Several servers as one: which server gets a request or new weights, which are left out, and when they return."""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

from valor.config import RolloutConfig
from valor.errors import TrainingStopped, WorkersReplaced
from valor.rollout.base import Request
from valor.rollout.server.client import CONNECT_SECONDS, ServerLeft
from valor.rollout.server.dialects import Dialect, TensorRTLLM, TokensAndImages
from valor.rollout.server.launch import StartedServer
from valor.rollout.server.sglang import SGLang
from valor.rollout.server.weights import WeightFiles, compare_names

DIALECTS: dict[str, type[Dialect]] = {"server": Dialect, "sglang": SGLang, "trtllm": TensorRTLLM}
_MOST_HOMES = 100_000  # prompts and episodes whose server is remembered
_SLACK = 8  # requests by which a server with the right cache may exceed twice the least load
_LOOK_SECONDS = 2.0  # between two looks at the servers that are left out

logger = logging.getLogger(__name__)


class Update(NamedTuple):
    """Weights of this name and checksum that the servers at `urls` hold."""

    name: str
    checksum: int
    urls: list[str]


class Fleet:
    """The servers of a run.

    A request goes to the server whose cache has its prompt's other samples, or its episode's earlier turns, unless
    that one is much busier than the least busy one.

    images: prompts may have some, of which `TokensAndImages` speaks.

    Attributes:
        out: addresses that are left out.
        load: requests in flight by address.
        name: of the weights that the other servers hold.
    """

    def __init__(self, config: RolloutConfig, started: Sequence[StartedServer], images: bool = False) -> None:
        self.dialect = (TokensAndImages if images else DIALECTS[config.name])(config)
        self.started = started
        self.client = self.dialect.client
        self.urls = [url.rstrip("/") for url in config.server.base_url]
        self.name = ""
        self.out: set[str] = set()
        self.load: Counter[str] = Counter()
        self._total: Counter[str] = Counter()
        self._homes: OrderedDict[tuple[object, ...], str] = OrderedDict()
        self._last_look = 0.0

    @property
    def present(self) -> list[str]:
        return [url for url in self.urls if url not in self.out]

    def choose(self, request: Request) -> str:
        """The server for a request; its load grows by one."""
        prompt = ("prompt", hash(tuple(request.prompt_ids)))  # not the ids, which would fill the memory of long runs
        episode, later_turn = ("episode", *request.seed[:3]), len(request.seed) > 3
        home = (self._homes.get(episode) if later_turn else None) or self._homes.get(prompt)
        least = min(self.present, key=lambda url: (self.load[url], self._total[url]))
        if home is None or home in self.out or self.load[home] > 2 * self.load[least] + _SLACK:
            home = least
        if not later_turn or episode not in self._homes:
            self._homes[prompt] = home
        self._homes[episode] = home
        while len(self._homes) > _MOST_HOMES:
            self._homes.popitem(last=False)
        self.load[home] += 1
        self._total[home] += 1
        return home

    def leave(self, url: str) -> bool:
        """Leave a server out; False: it is the last one."""
        if len(self.present) > 1 or url in self.out:
            self.out.add(url)
            return True
        return False

    def update(self, files: WeightFiles, version: int) -> Update:
        """Replace the weights of all servers that answer.

        TrainingStopped unless each of their workers then holds exactly what was sent.
        """
        name = f"{uuid4().hex}-{version}"  # differs from every other run's

        async def send(url: str) -> list[dict[str, Any]] | None:
            with suppress(ServerLeft):
                return await self.dialect.update(url, files, name, version, partial(self.leave, url))

        returned = self.look()
        replies = {url: self.client.submit(send(url)) for url in [*self.present, *returned]}
        updated = {url: workers for url, reply in replies.items() if (workers := reply.result()) is not None}
        # Servers of as many parts compute the same digest of the same weights.
        first: dict[str, tuple[str, str]] = {}
        for url, workers in updated.items():
            for worker in workers:
                problem = worker.get("error")
                if problem is None and int(worker.get("checksum", files.checksum)) != files.checksum:
                    problem = f"it holds {worker['checksum']}, {files.checksum} was sent"
                if problem is not None:
                    raise TrainingStopped(f"the rollout server at {url} has not taken weights {version}: {problem}")
            digest = workers[0].get("digest", "")
            other, expected = first.setdefault(digest.partition(" ")[2], (url, digest))
            if digest != expected:
                raise TrainingStopped(
                    f"the rollout servers at {other} and {url} were sent the same weights {version} and hold different "
                    f"ones: {expected} and {digest}"
                )
        return Update(name, files.checksum, [*updated])

    def updated(self, update: Update) -> None:
        """Take note of an update; servers without it are left out."""
        self.name = update.name
        if self.out:  # returning servers get their share
            self._homes.clear()
        self.out = {url for url in self.urls if url not in update.urls}

    def holds(self, url: str) -> bool:
        """Whether a server answers and holds the last weights; WorkersReplaced where the only one does not."""
        try:
            names = self.client.submit(self.dialect.held_weights(url, leave=partial(self.leave, url))).result()
            compare_names(url, names, self.name)
        except ServerLeft:
            return False
        except WorkersReplaced:
            if not self.leave(url):
                raise
            return False
        return True

    def check(self) -> None:
        """WorkersReplaced when a server has to be sent the weights: the only one, or one that returned."""
        for url in self.present:
            self.holds(url)
        if returned := self.look():
            raise WorkersReplaced(f"the rollout server at {returned[0]} is there again: it is sent the weights")

    def look(self) -> list[str]:
        """Readmit the servers that hold the last weights again; returns the others that answer."""
        return self.client.submit(self._look()).result()

    def look_after(self) -> None:
        """Every few seconds: look at the servers that are left out, and restart those of this run that have ended."""
        if time.monotonic() < self._last_look + _LOOK_SECONDS:
            return
        self._last_look = time.monotonic()
        if self.out:
            self.client.submit(self._look())
        for server in self.started:
            if server.revive():
                logger.warning("the server at %s has ended: it is started again", server.url)

    def sleep(self) -> None:
        self._tell(self.dialect.sleep)

    def close(self) -> None:
        """End the servers that were started here; leave others awake."""
        if not self.started:
            with suppress(TrainingStopped):
                self._tell(self.dialect.wake)
        for server in self.started:
            server.close()
        self.client.close()

    def _tell(self, command: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        for url in self.present:
            self.client.submit(command(url)).result()

    async def _look(self) -> list[str]:
        answering = []
        for url in sorted(self.out):
            with suppress(ServerLeft, TrainingStopped):
                await self.client.request(self.dialect.health(url), leave=lambda: True, seconds=CONNECT_SECONDS)
                answering.append(url)
                if not self.name or {*await self.dialect.held_weights(url, leave=lambda: True)} == {self.name}:
                    self.out.discard(url)
        return [url for url in answering if url in self.out]
