"""A grader behind an HTTP address of the user's: one request a sample, many at once, no more than the server bears."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import httpx2

from valor.errors import UserError
from valor.rewards.worker import RewardResult, Sample, as_result, describe_error

if TYPE_CHECKING:
    from valor.config.reward import RemoteGraderConfig

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0  # seconds between two attempts


class RemoteGraders:
    """Posts samples as JSON (the arguments of compute_score); the reply is what compute_score would return, as JSON.

    Requests run in a thread of their own, `max_concurrent` at once and at most `requests_per_second` begun in a
    second. A refused or broken one (no connection, status 408, 429, 5xx) is tried again with growing pauses, all
    within `timeout` seconds from the sample's turn on; after that the sample gets `error_score`.
    """

    def __init__(self, config: RemoteGraderConfig, *, timeout: float, error_score: float) -> None:
        assert config.url is not None, "a configuration with this manager names it"
        self.url, self.timeout, self.error_score = config.url, timeout, error_score
        key = os.environ.get(config.api_key_env) if config.api_key_env else None
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._gate = asyncio.Semaphore(config.max_concurrent)
        self._pace = 1 / config.requests_per_second if config.requests_per_second else 0.0
        self._next_start = 0.0
        # Time is limited per sample; the client's own limits are per read and would cut long answers.
        limits = httpx2.Limits(max_connections=config.max_concurrent)
        self._client = httpx2.AsyncClient(headers=self._headers, timeout=None, limits=limits)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Before a run: UserError when nobody listens at the address, or the key is refused."""
        try:
            status = httpx2.get(self.url, headers=self._headers, timeout=min(self.timeout, 10.0)).status_code
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise UserError(f"no grader at reward.remote.url={self.url}: {describe_error(error)}") from None
        if status in (401, 403):
            raise UserError(
                f"the grader at {self.url} refuses (status {status}): name its key's reward.remote.api_key_env"
            )

    def submit_all(self, samples: Sequence[Sample]) -> list[Future[RewardResult]]:
        """Grade samples in the background. The futures never fail: errors are in their results."""
        return [asyncio.run_coroutine_threadsafe(self._grade(sample), self._loop) for sample in samples]

    def close(self) -> None:
        """End the thread; requests under way are dropped."""
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def _grade(self, sample: Sample) -> RewardResult:
        async with self._gate:
            began = time.perf_counter()
            kind = "exception"
            try:
                body = json.dumps(sample._asdict(), default=_as_json)
                value = await self._reply(body, began + self.timeout)
                return as_result(value, time.perf_counter() - began, self.error_score)
            except TimeoutError as error:
                kind, reason = "timeout", str(error) or f"no score within {self.timeout:g} s (reward.timeout)"
            except Exception as error:
                reason = describe_error(error)
            return RewardResult(self.error_score, {}, reason, time.perf_counter() - began, kind)

    async def _reply(self, body: str, end: float) -> Any:
        """The server's answer. Raises TimeoutError that names the last refusal, or what cannot be mended by waiting."""
        pause, refusal = _FIRST_PAUSE, ""
        while True:
            await self._turn()
            try:
                async with asyncio.timeout(end - time.perf_counter()):
                    reply = await self._client.post(self.url, content=body)
                if reply.status_code == 200:
                    return reply.json()
                refusal = f"status {reply.status_code}: {' '.join(reply.text.split())[:200]}"
                if reply.status_code not in (408, 429) and reply.status_code < 500:
                    raise RuntimeError(refusal)
            except httpx2.HTTPError as error:
                refusal = describe_error(error)
            if time.perf_counter() + pause > end:
                raise TimeoutError(f"no score within {self.timeout:g} s (reward.timeout); last: {refusal}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _turn(self) -> None:
        """Wait until the next request may begin."""
        now = time.perf_counter()
        start = max(now, self._next_start)
        self._next_start = start + self._pace
        await asyncio.sleep(start - now)


def _as_json(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays, as parquet files have them
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")
