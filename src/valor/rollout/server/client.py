"""HTTP requests to generation servers, repeated while a server is unreachable."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx2

from valor.config.rollout import ServerConfig
from valor.errors import TrainingStopped
from valor.http_client import LoopThread, describe, json_headers, past_proxies

CONNECT_SECONDS = 10.0
_PATIENCE = 30.0  # seconds for which a reachable server may refuse a request
_UNAVAILABLE = (408, 429, 502, 503, 504)  # status of a server that is overloaded or still starting
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 4.0  # seconds between two attempts
_MOST_REFUSALS = 3  # before the request goes to another server

logger = logging.getLogger(__name__)


class ServerLeft(Exception):
    """The server failed and was removed from the fleet; other servers remain."""


class ConnectionLost(Exception):
    """The connection broke before the reply to a request that must not be repeated as it is."""


class ServerClient(LoopThread):
    """Client of all servers of a run. An unreachable server is waited for during `timeout` seconds."""

    def __init__(self, config: ServerConfig) -> None:
        headers, mounts = json_headers(config.api_key_env), past_proxies(*config.base_url)
        super().__init__(httpx2.AsyncClient(headers=headers, limits=httpx2.Limits(), mounts=mounts))
        self.timeout = config.timeout
        self._unreachable: set[str] = set()

    async def request(
        self,
        url: str,
        body: Any = None,
        *,
        leave: Callable[[], bool] = lambda: False,
        repeat: bool = True,
        seconds: float | None = None,
    ) -> Any:
        """JSON reply to a POST of `body`, or to a GET without one.

        leave: called before a failing server is waited for; True raises ServerLeft.
        repeat: False raises ConnectionLost where the connection breaks, instead of sending the request again.
        seconds: limit of one reply (default: `timeout`).
        TrainingStopped when the server refuses, or stays unreachable.
        """
        method, content = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        limit, pause, refusals = seconds or self.timeout, _FIRST_PAUSE, 0
        was_absent: bool | None = None
        timeout = httpx2.Timeout(limit, connect=min(limit, CONNECT_SECONDS), pool=None)
        while True:
            lost = timed_out = False
            try:
                reply = await self.http.request(method, url, content=content, timeout=timeout)
                if reply.status_code == 200:
                    self._unreachable.discard(url)
                    with suppress(ValueError):  # half a reply, from a gateway
                        return reply.json() if reply.content.startswith((b"{", b"[")) else None
                refusal = f"status {reply.status_code}: {' '.join(reply.text.split())[:300]}"
            except httpx2.ReadTimeout:
                timed_out, refusal = True, f"no answer within {limit:g} s (actor_rollout_ref.rollout.server.timeout)"
            except httpx2.TransportError as error:
                lost, refusal = True, describe(error)
            status = 0 if lost or timed_out else reply.status_code
            absent = lost or status in _UNAVAILABLE
            passes = absent or status >= 500 or status == 200
            refusals += 1
            if (lost or timed_out or (passes and refusals >= _MOST_REFUSALS)) and leave():
                logger.warning("%s is left out until it answers again: %s", url, refusal)
                raise ServerLeft(refusal)
            if absent is not was_absent:
                was_absent, end = absent, time.monotonic() + (self.timeout if absent else _PATIENCE)
            if not passes or time.monotonic() + pause > end:
                hint = ": start it again, and the same command goes on from the last checkpoint" if passes else ""
                raise TrainingStopped(f"the rollout server at {url} failed: {refusal}{hint}")
            if lost and url not in self._unreachable:
                self._unreachable.add(url)
                logger.warning("%s does not answer (%s): waiting up to %g s", url, refusal, self.timeout)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if lost and not repeat:
                raise ConnectionLost(refusal)


def root(url: str) -> str:
    """Address of the routes outside OpenAI's protocol."""
    return url.removesuffix("/v1")
