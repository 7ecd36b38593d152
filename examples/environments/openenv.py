"""Environments behind an OpenEnv server, over its WebSocket (huggingface/OpenEnv, core/env_server/http_server.py)."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from valor.agents.env import Env, Step, row_number
from valor.agents.tools import as_text
from valor.errors import UserError
from valor.rewards.answers import after_thinking
from valor.user_files import installed

_PAUSE = 0.5  # seconds between tries to get a session
_MAX_BYTES = 16 * 2**20  # of an observation
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class OpenEnvError(RuntimeError):
    """The server's error, with its code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class OpenEnv(Env):
    """A server at `url` (http://host:port): a session of its own for each episode.

    The policy's text is the field `action` of an action, beside the fields `action_fields`; the policy reads the field
    `observation` of the answer (None: all fields as JSON). `reset` goes to the server's reset, with `seed` (of
    extra_info, or the row's number). An episode for which the server gave no reward at all, because it was cut off,
    say, is worth `unscored` (None: a grader decides). Where all sessions are taken, it waits `reset_seconds` for one.
    UserError: no `websockets` package, or no address.
    """

    def __init__(
        self,
        url: str,
        action: str = "message",
        action_fields: Mapping[str, Any] | None = None,
        observation: str | None = None,
        reset: Mapping[str, Any] | None = None,
        unscored: float | None = None,
        reset_seconds: float = 600.0,
    ) -> None:
        client = installed("websockets.asyncio.client", "an OpenEnv server needs websockets", "'valor-rl[agents]'")
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES or not parts.netloc:
            raise UserError(f"'{url}' is no address of an OpenEnv server; http://127.0.0.1:8000 is one")
        self._url = f"{_SCHEMES[parts.scheme]}://{parts.netloc}{parts.path.rstrip('/')}/ws"
        self._connect, self._socket = client.connect, None
        self._action, self._fields, self._observation = action, dict(action_fields or {}), observation
        self._reset, self.reset_seconds, self._score = dict(reset or {}), reset_seconds, unscored

    async def reset(self, row: Mapping[str, Any]) -> str:
        data = {"seed": row_number(row), **self._reset}
        while True:
            self._socket = await self._connect(self._url, max_size=_MAX_BYTES, proxy=None)
            try:
                return self._text(await self._request("reset", data))
            except OpenEnvError as error:
                await self._socket.close()
                if error.code != "CAPACITY_REACHED":
                    raise
            await asyncio.sleep(_PAUSE)

    async def step(self, text: str) -> Step:
        answer = await self._request("step", {**self._fields, self._action: after_thinking(text).strip()})
        reward = answer.get("reward")
        if reward is not None:
            self._score = 0.0  # beside the rewards
        return Step(self._text(answer), float(reward or 0.0), bool(answer.get("done")))

    def score(self) -> float | None:
        return self._score

    async def close(self) -> None:
        if self._socket is not None:
            await self._send({"type": "close"})
            await self._socket.close()

    async def _request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The observation that answers a message. Raises OpenEnvError."""
        assert self._socket is not None, "it is open"
        await self._send({"type": kind, "data": data})
        answer = json.loads(await self._socket.recv())
        if answer["type"] == "error":
            raise OpenEnvError(str(answer["data"].get("code")), str(answer["data"].get("message")))
        return answer["data"]

    async def _send(self, message: Mapping[str, Any]) -> None:
        """A server without a free session hangs up before the first message; its reason is still to be received."""
        from websockets.exceptions import ConnectionClosed

        assert self._socket is not None, "it is open"
        with suppress(ConnectionClosed):
            await self._socket.send(json.dumps(message))

    def _text(self, answer: Mapping[str, Any]) -> str:
        fields = answer["observation"]
        if self._observation is None:
            return as_text({key: value for key, value in fields.items() if key != "metadata" and value is not None})
        if self._observation not in fields:
            raise KeyError(f"observations have the fields {', '.join(fields)}, and not '{self._observation}'")
        return as_text(fields[self._observation])
