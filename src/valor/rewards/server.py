"""A grader behind an address: samples as JSON, many at once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from valor.http_client import Server
from valor.rewards.worker import RewardResult, Sample, as_result, describe_error, gather

if TYPE_CHECKING:
    from valor.config.reward import RemoteGraderConfig


class RemoteGraders:
    """Posts samples as JSON (the arguments of compute_score); the reply is what compute_score would return, as JSON.

    A sample without a score `timeout` seconds after its turn has come gets `error_score`.
    """

    one_by_one = grades_everything = True

    def __init__(self, config: RemoteGraderConfig, *, timeout: float, error_score: float) -> None:
        assert config.url is not None, "a configuration with this manager names it"
        self.url, self.timeout, self.error_score = config.url, timeout, error_score
        self._server = Server(
            config.url,
            api_key_env=config.api_key_env,
            max_concurrent=config.max_concurrent,
            per_second=config.requests_per_second,
        )

    def check(self, data_sources: Iterable[str] = ()) -> None:
        """Before a run: UserError when nobody listens at the address, or the key is refused."""
        self._server.check(self.url, "grader", "reward.remote.url", "reward.remote.api_key_env")

    def submit_all(self, samples: Sequence[Sample]) -> list[Future[RewardResult]]:
        """Grade samples in the background. The futures never fail: errors are in their results."""
        return [self._server.submit(self._grade(sample)) for sample in samples]

    def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Grade samples; results in their order."""
        return gather(self.submit_all(samples))

    def close(self) -> None:
        """End the thread; requests under way are dropped."""
        self._server.close()

    async def _grade(self, sample: Sample) -> RewardResult:
        began, kind = time.perf_counter(), "exception"
        try:
            body = json.dumps(sample._asdict(), default=_as_json)
            reply = await self._server.post(self.url, body, seconds=self.timeout)
            return as_result(reply.json(), time.perf_counter() - began, self.error_score)
        except TimeoutError as error:
            kind, reason = "timeout", f"no score within {self.timeout:g} s (reward.timeout); last: {error}"
        except Exception as error:
            reason = describe_error(error)
        return RewardResult(self.error_score, {}, reason, time.perf_counter() - began, kind)


def _as_json(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays, as parquet files have them
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")
