"""Asking servers from a thread of its own, so that answers come in whatever the caller is doing.

The servers live and die on their own: one that is away is asked again for a while.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
from anyio.from_thread import BlockingPortal, start_blocking_portal

from valor.config.rollout import ServerConfig
from valor.errors import TrainingStopped

CONNECT_SECONDS = 10.0
_PATIENCE = 30.0  # seconds for which a server may refuse what it is asked
_AWAY = (408, 429, 502, 503, 504)  # status of a server that is too busy, or is not there yet
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 4.0  # seconds between two attempts

logger = logging.getLogger(__name__)


class Connection:
    """The servers of a run. A server may be away for `server.timeout` seconds: it is being started again."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._portal: BlockingPortal | None = None
        self._away: set[str] = set()

    @contextmanager
    def opened(self) -> Iterator[BlockingPortal]:
        """The thread in which the coroutines here run, for the block (and all blocks inside it)."""
        if self._portal is not None:
            yield self._portal
            return
        self.client = httpx2.AsyncClient(
            headers=headers(self._config),
            timeout=httpx2.Timeout(self._config.timeout, connect=CONNECT_SECONDS, pool=None),
            limits=httpx2.Limits(),
        )
        try:
            with start_blocking_portal() as self._portal, self._portal.wrap_async_context_manager(self.client):
                yield self._portal
        finally:
            self._portal = None

    async def post(self, url: str, body: Any, *, lost: Callable[[], Awaitable[None]] | None = None) -> Any:
        """The reply. `lost` is awaited before a server is asked again with which the connection was lost.

        TrainingStopped when the server stays away, or refuses.
        """
        pause, was_away, end = _FIRST_PAUSE, None, 0.0
        while True:
            broken = False
            try:
                reply = await self.client.post(url, json=body)
                if reply.status_code == 200:
                    self._away.discard(url)
                    return reply.json()
                refusal = f"status {reply.status_code}: {' '.join(reply.text.split())[:300]}"
                away, again = reply.status_code in _AWAY, reply.status_code in _AWAY or reply.status_code >= 500
            except httpx2.ReadTimeout:
                limit = self._config.timeout
                refusal = f"no answer within {limit:g} s (actor_rollout_ref.rollout.server.timeout)"
                away = again = False
            except httpx2.TransportError as error:
                refusal = f"{type(error).__name__}: {error}".rstrip(": ")
                broken = away = again = True
            if away != was_away:
                was_away, end = away, time.monotonic() + (self._config.timeout if away else _PATIENCE)
            if not again or time.monotonic() + pause > end:
                hint = ": start it again, and the same command goes on from the last checkpoint" if again else ""
                raise TrainingStopped(f"the rollout server at {url} failed: {refusal}{hint}")
            if broken and url not in self._away:
                self._away.add(url)
                logger.warning("%s does not answer (%s): waiting up to %g s", url, refusal, self._config.timeout)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if broken and lost is not None:
                await lost()

    async def rpc(self, url: str, method: str, *args: Any) -> list[dict[str, Any]]:
        """What `WeightReceiver` answers in each of the server's workers."""
        body = {"method": method, "args": args, "timeout": self._config.timeout}
        return (await self.post(f"{root(url)}/collective_rpc", body))["results"]


def addresses(config: ServerConfig) -> list[str]:
    """The servers' addresses without a slash at the end."""
    return [url.rstrip("/") for url in config.base_url]


def root(url: str) -> str:
    """Where a server has what is not OpenAI's protocol."""
    return url.removesuffix("/v1")


def headers(config: ServerConfig) -> dict[str, str]:
    """With the key, if there is one."""
    key = os.environ.get(config.api_key_env)
    return {"Authorization": f"Bearer {key}"} if key else {}
