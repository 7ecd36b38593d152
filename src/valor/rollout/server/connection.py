"""Asking servers from a thread of its own, so that answers come in whatever the caller is doing.

The servers live and die on their own: one that is away is asked again for a while.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
from anyio.from_thread import BlockingPortal, start_blocking_portal

from valor.config.rollout import ServerConfig
from valor.errors import TrainingStopped
from valor.http_client import describe, json_headers

CONNECT_SECONDS = 10.0
_PATIENCE = 30.0  # seconds for which a server may refuse what it is asked
_AWAY = (408, 429, 502, 503, 504)  # status of a server that is too busy, or is not there yet
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 4.0  # seconds between two attempts
_STUMBLES = 3  # refusals that may pass, before another server is asked

Sign = Callable[[str, str, bytes], dict[str, str]]
"""Headers of a request, from its method, path and body."""

logger = logging.getLogger(__name__)


class Away(Exception):
    """A server does not do what it is asked, and there are others."""


class Connection:
    """The servers of a run. A server may be away for `server.timeout` seconds: it is being started again."""

    def __init__(self, config: ServerConfig) -> None:
        self._config, self.timeout = config, config.timeout
        self._portal: BlockingPortal | None = None
        self._away: set[str] = set()

    @contextmanager
    def opened(self) -> Iterator[BlockingPortal]:
        """The thread in which the coroutines here run, for the block (and all blocks inside it)."""
        if self._portal is not None:
            yield self._portal
            return
        self.client = httpx2.AsyncClient(headers=json_headers(self._config.api_key_env), limits=httpx2.Limits())
        try:
            with start_blocking_portal() as self._portal, self._portal.wrap_async_context_manager(self.client):
                yield self._portal
        finally:
            self._portal = None

    async def ask(
        self,
        url: str,
        body: Any = None,
        *,
        lost: Callable[[], Awaitable[None]] | None = None,
        leave: Callable[[], bool] = lambda: False,
        pending: bool = False,
        sign: Sign | None = None,
        seconds: float | None = None,
    ) -> Any:
        """The reply to a POST, or to a GET where there is no body.

        `lost` is awaited before a server is asked again with which the connection was lost. `leave` is asked before a
        server is waited for: if it says so, Away is raised. `pending`: status 400 says that requests have not ended
        yet, and passes. `sign` gives further headers. `seconds`: for one reply. TrainingStopped when the server stays
        away, or refuses.
        """
        pause, was_away, end, refusals = _FIRST_PAUSE, None, 0.0, 0
        method, content = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        limit = seconds or self.timeout
        timeout = httpx2.Timeout(limit, connect=min(limit, CONNECT_SECONDS), pool=None)
        while True:
            broken, gone, refusals = False, False, refusals + 1
            more = sign(method, httpx2.URL(url).path, content) if sign else None
            try:
                reply = await self.client.request(method, url, content=content, headers=more, timeout=timeout)
                if reply.status_code == 200:
                    self._away.discard(url)
                    return reply.json() if reply.content.startswith((b"{", b"[")) else None
                refusal = f"status {reply.status_code}: {' '.join(reply.text.split())[:300]}"
                away = reply.status_code in _AWAY
                again = away or reply.status_code >= 500 or (pending and reply.status_code in (400, 409))
            except httpx2.ReadTimeout:
                refusal = f"no answer within {limit:g} s (actor_rollout_ref.rollout.server.timeout)"
                away = again = False
                gone = True
            except httpx2.TransportError as error:
                refusal = describe(error)
                gone = broken = away = again = True
            if (gone or (again and refusals >= _STUMBLES)) and leave():
                logger.warning("%s is left out until it answers again: %s", url, refusal)
                raise Away(refusal)
            if away != was_away:
                was_away, end = away, time.monotonic() + (self.timeout if away else _PATIENCE)
            if not again or time.monotonic() + pause > end:
                hint = ": start it again, and the same command goes on from the last checkpoint" if again else ""
                raise TrainingStopped(f"the rollout server at {url} failed: {refusal}{hint}")
            if broken and url not in self._away:
                self._away.add(url)
                logger.warning("%s does not answer (%s): waiting up to %g s", url, refusal, self.timeout)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if broken and lost is not None:
                await lost()


def root(url: str) -> str:
    """Where a server has what is not OpenAI's protocol."""
    return url.removesuffix("/v1")
