"""TensorRT-LLM's `trtllm-serve`: OpenAI's completions by token ids, and memory given back by signed requests.

No weights can be sent to it over HTTP. Shapes: docs/servers.md.
"""

import hashlib
import hmac
import os
import secrets
import time
from functools import partial
from typing import Any

from valor.errors import TrainingStopped
from valor.rollout.server.connection import root
from valor.rollout.server.dialects import Ask, Dialect

_HEADER = "x-trtllm-runtime-control"
_KEY_VARIABLE = "TRTLLM_RUNTIME_CONTROL_API_KEY"  # as trtllm-serve itself reads it


def signed(key: str, whole: bool, method: str, path: str, body: bytes) -> dict[str, str]:
    """Headers that prove that a request comes from who knows `key`: an HMAC of its body, or, in releases that want
    it (`whole`), of its method, path, time and a number that is never used again as well."""
    more = {}
    if whole:
        when, once = str(int(time.time())), secrets.token_hex(16)
        body = "\n".join(("trtllm-runtime-control-v1", method, path, when, once, "")).encode() + body
        more = {f"{_HEADER}-timestamp": when, f"{_HEADER}-nonce": once}
    return {f"{_HEADER}-auth": f"sha256={hmac.new(key.encode(), body, hashlib.sha256).hexdigest()}", **more}


class TensorRTLLM(Dialect):
    """It keeps the weights that it was started with."""

    def _own_fields(self, ask: Ask) -> dict[str, Any]:
        # Detokenized, there are no token ids.
        return {"top_k": max(ask.params.top_k, 0), "seed": ask.seed % 2**31, "logprobs": 1, "detokenize": False}

    def abort(self, url: str, name: str) -> None:
        return None

    async def sleep(self, url: str) -> None:
        await self._control(f"{root(url)}/release_memory", {})

    async def wake(self, url: str) -> None:
        await self._control(f"{root(url)}/resume_memory", {})
        status = await self._control(f"{root(url)}/memory_status")
        if status["state"] != "running":
            raise TrainingStopped(f"the rollout server at {url} does not wake up: it says {status}")

    async def _control(self, url: str, body: dict[str, Any] | None = None) -> Any:
        key = os.environ.get(_KEY_VARIABLE, "")
        try:
            return await self.connection.ask(url, body, pending=True, sign=partial(signed, key, True))
        except TrainingStopped as refused:
            if "status 401" not in str(refused):
                raise
        return await self.connection.ask(url, body, pending=True, sign=partial(signed, key, False))
