"""The same runs on a SandboxFusion server (https://github.com/bytedance/SandboxFusion), by its `POST /run_code`.

A program is sent once for each input; functions and their tests go as one program that keeps them apart, see
payload.standalone. What the code cannot do there is up to that server.
"""

from __future__ import annotations

import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from valor.sandbox import payload
from valor.sandbox.box import Limits, Outcome, SandboxError, Verdict

_STANDALONE = Path(payload.__file__).read_text(encoding="utf-8") + "\n\nstandalone()\n"
_COMPILE_SECONDS = 10.0
_ATTEMPTS = 3  # of a request that found the server busy or was lost on the way
_BUSY = (429, 502, 503, 504)


class SandboxFusion:
    """A client with at most `max_concurrent` requests at a time. The clock of the server counts as CPU time."""

    def __init__(self, url: str, limits: Limits, max_concurrent: int) -> None:
        self.url = url if url.rstrip("/").endswith("/run_code") else f"{url.rstrip('/')}/run_code"
        self.limits = limits
        self._threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="sandbox-fusion")

    def __enter__(self) -> SandboxFusion:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def run_all(self, code: str, inputs: Sequence[str], end: float) -> Iterator[Outcome]:
        """Run a program once for each input, until `end` (as of time.monotonic). Raises SandboxError."""
        yield from self._threads.map(lambda text: self._run(code, text, end), inputs)

    def check(
        self, codes: Sequence[str], setup: Sequence[str], tests: Sequence[str], candidates: Sequence[str]
    ) -> Verdict:
        """Run tests for functions, see Sandbox.check. Raises SandboxError."""
        word = secrets.token_hex(16)
        stdin = "".join(
            f"{len(message):08x}{message}"
            for message in (
                payload.encode(part).hex() for part in (list(codes), (word, list(setup), list(tests), list(candidates)))
            )
        )
        outcome = self._run(_STANDALONE, stdin, time.monotonic() + self.limits.wall_seconds)
        _, signed, verdict = outcome.stdout.partition(word)
        if not signed:
            return Verdict(0, len(tests), outcome.error or "the code under test ended its tests")
        passed, error = payload.decode(bytes.fromhex(verdict), lambda target: None)
        return Verdict(passed, len(tests), error or None)

    def _run(self, code: str, stdin: str, end: float) -> Outcome:
        seconds = min(self.limits.cpu_seconds, end - time.monotonic())
        if seconds <= 0:
            return Outcome("", "no time left for this test", True)
        request = {"language": "python", "code": code, "stdin": stdin, "run_timeout": seconds}
        request |= {"compile_timeout": _COMPILE_SECONDS, "memory_limit_MB": self.limits.memory_mb}
        answer = self._post(json.dumps(request).encode(), seconds + _COMPILE_SECONDS)
        if answer.get("status") not in ("Success", "Failed"):
            raise SandboxError(f"{self.url}: {answer.get('status')}: {str(answer.get('message'))[:200]}")
        result = answer.get("run_result") or answer.get("compile_result") or {}
        if result.get("status") == "TimeLimitExceeded":
            return Outcome("", f"no end within {seconds:.3g} s", True)
        messages = (result.get("stderr") or "").strip().splitlines() or [f"exit status {result.get('return_code')}"]
        return Outcome(result.get("stdout") or "", None if answer["status"] == "Success" else messages[-1][:300])

    def _post(self, body: bytes, seconds: float) -> dict[str, Any]:
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with urllib.request.urlopen(request, timeout=seconds) as response:
                    return json.load(response)
            except (OSError, ValueError) as error:
                lost = not isinstance(error, urllib.error.HTTPError | ValueError)
                busy = isinstance(error, urllib.error.HTTPError) and error.code in _BUSY
                if attempt == _ATTEMPTS or not (lost or busy):
                    raise SandboxError(f"{self.url}: {error}") from None
                time.sleep(0.5 * attempt)
        raise AssertionError
