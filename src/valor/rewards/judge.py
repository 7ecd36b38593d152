"""A generative judge: a language model behind an OpenAI-compatible server says what a response is worth."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx2

from valor.errors import UserError
from valor.rewards.worker import RewardResult, gather

if TYPE_CHECKING:
    from valor.config.reward import JudgeConfig

_PROMPT = Path(__file__).with_name("judge_prompt.txt")
_FIELD = re.compile(r"\{(prompt|response|ground_truth)\}")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds between two attempts
_TEMPORARY = frozenset({408, 409, 429})  # and every status from 500 on


class Question(NamedTuple):
    """What the judge is asked about."""

    prompt: str
    response: str
    ground_truth: Any = None


class Judge:
    """Asks `concurrency` questions at once; one without a score after all attempts gets `error_score`.

    Requests are made in a thread of its own. The key in the environment variable `api_key_env` is sent as a bearer
    token.
    """

    def __init__(self, config: JudgeConfig, error_score: float) -> None:
        assert config.url is not None and config.model is not None, "a configuration that enables a judge names both"
        self.config, self.error_score, self.url = config, error_score, config.url.rstrip("/")
        self._score = re.compile(config.score_regex)
        self._template = config.prompt_template or _PROMPT.read_text(encoding="utf-8")
        self._gate = asyncio.Semaphore(config.concurrency)
        # Time is limited per request below; the client's own limits are per read and would cut long answers.
        limits = httpx2.Limits(max_connections=config.concurrency)
        self._client = httpx2.AsyncClient(headers=self._headers(), timeout=None, limits=limits)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def check(self) -> None:
        """Before a run: UserError when nobody listens at the address, or the key is refused."""
        key = "reward.reward_model.judge"
        try:
            status = httpx2.get(f"{self.url}/models", headers=self._headers(), timeout=10.0).status_code
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise UserError(f"no judge at {key}.url={self.config.url}: {_describe(error)}") from None
        if status in (401, 403):
            raise UserError(
                f"the judge at {self.config.url} refuses the key (status {status}): put it into the environment "
                f"variable {self.config.api_key_env or 'that you name'} ({key}.api_key_env)"
            )

    def score(self, questions: Sequence[Question]) -> list[RewardResult]:
        """One result a question, in order; never raises for what the server does."""
        return gather([self._submit(self._judge(question)) for question in questions])

    def _submit(self, job: Coroutine[Any, Any, RewardResult]) -> Future[RewardResult]:
        async def in_turn() -> RewardResult:
            async with self._gate:
                return await job

        return asyncio.run_coroutine_threadsafe(in_turn(), self._loop)

    async def _judge(self, question: Question) -> RewardResult:
        began, config = time.perf_counter(), self.config
        body = {**config.request, "model": config.model, "messages": [{"role": "user", "content": self.ask(question)}]}
        try:
            reply = await self._post(json.dumps(body))
            score = self.read(reply.json()["choices"][0]["message"]["content"] or "")
            return RewardResult(score, {}, None, time.perf_counter() - began)
        except (TimeoutError, RuntimeError) as error:
            reason = str(error)
        except Exception as error:
            reason = f"the reply is no chat completion ({type(error).__name__})"
        return RewardResult(self.error_score, {}, f"judge: {reason}", time.perf_counter() - began)

    async def _post(self, body: str) -> httpx2.Response:
        """The reply, of status 200. No connection, 408, 409, 429 and 5xx are tried again, with growing pauses.

        Raises TimeoutError, with the last refusal, after all attempts, and RuntimeError for one that will not pass.
        """
        pause, seconds, refusal = _FIRST_PAUSE, self.config.timeout, ""
        for attempt in range(1 + self.config.retries):
            if attempt:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                async with asyncio.timeout(seconds):
                    reply = await self._client.post(f"{self.url}/chat/completions", content=body)
                if reply.status_code == 200:
                    return reply
                refusal = f"status {reply.status_code}: {' '.join(reply.text.split())[:200]}"
                if reply.status_code not in _TEMPORARY and reply.status_code < 500:
                    raise RuntimeError(refusal)
            except TimeoutError:
                refusal = f"no reply within {seconds:g} s"
            except httpx2.HTTPError as error:
                refusal = _describe(error)
        raise TimeoutError(refusal)

    def _headers(self) -> dict[str, str]:
        key = os.environ.get(self.config.api_key_env) if self.config.api_key_env else None
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def ask(self, question: Question) -> str:
        """The text of the request. What stands in prompt or response is never taken for a field of the template."""
        values = question._asdict()
        return _FIELD.sub(lambda field: str(values[field[1]]), self._template)

    def read(self, text: str) -> float:
        """The score in a reply. Raises RuntimeError when it has none."""
        found = self._score.findall(text)
        if not found:
            raise RuntimeError(f"no score in the reply: {' '.join(text.split())[-80:]!r}")
        last = found[-1] if isinstance(found[-1], str) else found[-1][0]
        low, high = self.config.score_range
        try:
            score = float(last)
        except ValueError:
            raise RuntimeError(f"the score is no number: {last[:40]!r}") from None
        if not low <= score <= high:
            raise RuntimeError(f"the score {score:g} is outside {low:g} to {high:g}")
        return score


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")[:200]
