"""A client of servers that take JSON: bounded concurrency, retries."""

import asyncio
import ipaddress
import os
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar
from urllib.request import getproxies

import httpx2

from valor.errors import UserError

_T = TypeVar("_T")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds between two attempts
_TEMPORARY = frozenset({408, 409, 429})  # and every status from 500 on


class LoopThread:
    """An event loop in a daemon thread of its own; `http` is closed with it."""

    def __init__(self, http: httpx2.AsyncClient | None = None) -> None:
        self.http: Any = http
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine there; cancelling the result cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End the thread; what runs there is dropped."""
        if self._thread.is_alive():
            if self.http is not None:
                asyncio.run_coroutine_threadsafe(self.http.aclose(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


def past_proxies(*urls: str) -> dict[str, None]:
    """`mounts` of a client of these addresses: those inside the network are asked directly, although the environment
    names a proxy (http_proxy), which is there for the outside."""
    if not getproxies():
        return {}
    mounts: dict[str, None] = {}
    for url in urls:
        with suppress(httpx2.InvalidURL, OSError, UnicodeError):  # whoever asks there says so; or the proxy knows it
            host = httpx2.URL(url).host
            numbers = [str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)]
            if host and not any(ipaddress.ip_address(number).is_global for number in numbers):
                mounts[f"all://[{host}]" if ":" in host else f"all://{host}"] = None
    return mounts


class Server(LoopThread):
    """Posts JSON from a thread of its own: `max_concurrent` jobs at once.

    The key in the environment variable `api_key_env` is sent as a bearer token.
    """

    def __init__(self, url: str, *, api_key_env: str | None, max_concurrent: int) -> None:
        # Time is limited per request below; the client's own limits are per read and would cut long answers.
        limits = httpx2.Limits(max_connections=max_concurrent)
        headers, mounts = json_headers(api_key_env), past_proxies(url)
        super().__init__(httpx2.AsyncClient(headers=headers, timeout=None, limits=limits, mounts=mounts))
        self.url, self._api_key_env = url, api_key_env
        self._gate = asyncio.Semaphore(max_concurrent)

    def check(self, url: str, who: str, url_key: str, key_key: str) -> None:
        """Before a run: UserError when nobody listens at the address, or the key is refused.

        `who` is behind it; `url_key` and `key_key` are the configuration keys of its address and of its key.
        """
        try:
            status = ask("GET", url, api_key_env=self._api_key_env, timeout=10.0).status_code
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise UserError(f"no {who} at {url_key}={self.url}: {describe(error)}") from None
        if status in (401, 403):
            raise UserError(
                f"the {who} at {self.url} refuses the key (status {status}): put it into the environment variable "
                f"{self._api_key_env or 'that you name'} ({key_key})"
            )

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a job, which may call `post`, in the background."""

        async def in_turn() -> _T:
            async with self._gate:
                return await work

        return super().submit(in_turn())

    async def post(self, url: str, body: str, *, seconds: float, attempts: int) -> httpx2.Response:
        """The reply, of status 200. No connection, 408, 409, 429 and 5xx are tried again, with growing pauses, or
        those that a `Retry-After` asks for, of at most half a minute.

        `seconds` are for each of the `attempts`. Raises TimeoutError, with the last refusal, when they are over, and
        RuntimeError for a refusal that will not pass.
        """
        refusal, least = "", 0.0
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(min(max(_FIRST_PAUSE * 2 ** (attempt - 1), least), _LONGEST_PAUSE))
            try:
                async with asyncio.timeout(seconds):
                    reply = await self.http.post(url, content=body)
            except TimeoutError:
                refusal = f"no reply within {seconds:g} s"
            except httpx2.HTTPError as error:
                refusal = describe(error)
            else:
                if reply.status_code == 200:
                    return reply
                refusal = f"status {reply.status_code}: {' '.join(reply.text.split())[:200]}"
                least = float(header) if (header := reply.headers.get("retry-after", "")).isdecimal() else 0.0
                if reply.status_code not in _TEMPORARY and reply.status_code < 500:
                    raise RuntimeError(refusal)
        raise TimeoutError(refusal)


def ask(method: str, url: str, *, api_key_env: str | None, timeout: Any, json: Any = None) -> httpx2.Response:
    """The reply to one request."""
    with httpx2.Client(headers=json_headers(api_key_env), timeout=timeout, mounts=past_proxies(url)) as client:
        return client.request(method, url, json=json)


def json_headers(api_key_env: str | None) -> dict[str, str]:
    """With the key in that environment variable, if there is one."""
    key = os.environ.get(api_key_env) if api_key_env else None
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")[:200]
