"""Several servers as one: which of them is asked for what, which are left out, and when they are asked again."""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from valor.config import RolloutConfig
from valor.errors import TrainingStopped, WorkersReplaced
from valor.rollout.base import Request
from valor.rollout.server.connection import CONNECT_SECONDS, Away
from valor.rollout.server.dialects import Dialect
from valor.rollout.server.launch import StartedServer
from valor.rollout.server.sglang import SGLang
from valor.rollout.server.trtllm import TensorRTLLM
from valor.rollout.server.weights import Sent, compare

DIALECTS: dict[str, type[Dialect]] = {"server": Dialect, "sglang": SGLang, "trtllm": TensorRTLLM}
_REMEMBERED = 100_000  # prompts and episodes whose server is known
_SLACK = 8  # requests by which a server may be ahead of twice the least loaded one's, for what it has in its cache
_LOOK_SECONDS = 2.0  # between two looks at the servers that are left out

logger = logging.getLogger(__name__)


class Fleet:
    """The servers of a run, those that are left out, and how many requests each of the others has.

    A request goes to the server that has its prompt's other samples, or its episode's earlier turns, in its cache,
    unless that is much busier than the least busy one, which is asked otherwise.

    `name`: of the weights that all servers hold which are not left out. `versions`: of all that were sent, by name.
    """

    def __init__(self, config: RolloutConfig, started: Sequence[StartedServer]) -> None:
        self.dialect, self.started = DIALECTS[config.name](config), started
        self.connection = self.dialect.connection
        self.urls = [url.rstrip("/") for url in config.server.base_url]
        self.name = ""
        self.versions: dict[str, int] = {}
        self.out: set[str] = set()
        self.load: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()
        self._homes: OrderedDict[tuple[object, ...], str] = OrderedDict()
        self._looked, self._asleep = 0.0, False

    @property
    def present(self) -> list[str]:
        return [url for url in self.urls if url not in self.out]

    def choose(self, request: Request) -> str:
        """The server for a request, which then has one more."""
        prompt = ("prompt", hash(tuple(request.prompt_ids)))  # itself it would fill the memory of long runs
        episode, later = ("episode", *request.seed[:3]), len(request.seed) > 3
        home = (self._homes.get(episode) if later else None) or self._homes.get(prompt)
        least = min(self.present, key=lambda url: (self.load[url], self._asked[url]))
        if home is None or home in self.out or self.load[home] > 2 * self.load[least] + _SLACK:
            home = least
        if not later or episode not in self._homes:
            self._homes[prompt] = home
        self._homes[episode] = home
        while len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        self.load[home] += 1
        self._asked[home] += 1
        return home

    def leave(self, url: str) -> bool:
        """Ask a server for nothing more; False: it is the last one, and there is nobody else to ask."""
        if len(self.present) > 1 or url in self.out:
            self.out.add(url)
            return True
        return False

    def have(self, sent: Sent, version: int) -> None:
        """These weights are held by all that have told so; the others are left out."""
        self.name, self._asleep = sent.name, False
        self.versions[sent.name] = version
        if self.out:  # who is there again gets its share
            self._homes.clear()
        self.out = {url for url in self.urls if url not in sent.held}

    def holds(self, url: str) -> bool:
        """Whether a server is there and holds what it was sent. WorkersReplaced: it does not, and is the last one."""
        with self.connection.opened() as portal:
            try:
                held = partial(self.dialect.held, url, leave=partial(self.leave, url))
                compare(url, portal.call(held), self.name)
            except Away:
                return False
            except WorkersReplaced:
                if not self.leave(url):
                    raise
                return False
            return True

    def check(self) -> None:
        """WorkersReplaced when one of the servers has to be sent the weights: the last one, or one that is back."""
        with self.connection.opened():
            for url in self.present:
                self.holds(url)
            if back := self.look():
                raise WorkersReplaced(f"the rollout server at {back[0]} is there again: it is sent the weights")

    def look(self) -> list[str]:
        """Ask those again that hold what they should; of those left out the others that answer."""
        with self.connection.opened() as portal:
            return portal.call(self._look)

    def look_after(self) -> None:
        """Now and then: ask again what was left out, and start again what was started here and has ended."""
        if time.monotonic() < self._looked + _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        if self.out:
            with self.connection.opened() as portal:
                portal.start_task_soon(self._look)
        for server in self.started:
            if server.revive():
                logger.warning("the server at %s has ended: it is started again", server.url)

    def sleep(self, *, first: bool) -> None:
        """Have the servers give back their memory; of all processes the `first` one tells them."""
        if first and not self._asleep:
            self._tell(self.dialect.sleep)
        self._asleep = True

    def wake(self) -> None:
        """Have them take it again, if they sleep and no weights have woken them."""
        if self._asleep:
            self._tell(self.dialect.wake)
        self._asleep = False

    def _tell(self, command: Callable[[str], Awaitable[None]]) -> None:
        with self.connection.opened() as portal:
            for url in self.present:
                portal.call(command, url)

    def close(self) -> None:
        """Leave the servers awake, and end those that were started here."""
        if not self.started:
            with suppress(TrainingStopped):
                self.wake()
        for server in self.started:
            server.close()

    async def _look(self) -> list[str]:
        answer = []
        for url in sorted(self.out):
            with suppress(Away, TrainingStopped):
                await self.connection.ask(self.dialect.health(url), leave=lambda: True, seconds=CONNECT_SECONDS)
                answer.append(url)
                if not self.name or {*await self.dialect.held(url, leave=lambda: True)} == {self.name}:
                    self.out.discard(url)
        return [url for url in answer if url in self.out]
