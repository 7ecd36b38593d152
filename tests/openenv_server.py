"""An OpenEnv server for tests: `python openenv_server.py PORT MOST_SESSIONS`. The policy is to count on from a number.

With the package `openenv` it is that package's own server. It does not go together with `mcp` 2, so the tests start
this file by the Python that VALOR_OPENENV_PYTHON names; without it, the same frames come from a few lines of starlette.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

LENGTH = 3  # steps of an episode


class Counting:
    """What both servers play. A step that is right is worth 1, any other has no reward; "boom" raises."""

    def __init__(self) -> None:
        self.value = self.steps = 0

    def begin(self, seed: int, by: int) -> dict[str, Any]:
        self.value, self.by = seed, by
        return {"text": f"count on from {seed} by {by}", "hint": None}

    def act(self, message: str) -> tuple[dict[str, Any], float | None, bool]:
        if message == "boom":
            raise RuntimeError("the counter broke")
        self.steps += 1
        right = message == str(self.value + self.by)
        self.value += self.by
        return {"text": f"it was {self.value}", "hint": None}, 1.0 if right else None, self.steps == LENGTH


def frames(most: int) -> Any:
    from starlette.applications import Starlette
    from starlette.routing import WebSocketRoute
    from starlette.websockets import WebSocket, WebSocketDisconnect

    sessions: set[int] = set()

    def error(code: str, message: str) -> dict[str, Any]:
        return {"type": "error", "data": {"message": message, "code": code}}

    def answer(game: Counting, asked: dict[str, Any]) -> dict[str, Any]:
        data = asked.get("data") or {}
        if asked["type"] == "reset":
            shown, reward, done = game.begin(data.get("seed", 0), data.get("by", 1)), None, False
        elif asked["type"] == "step":
            if set(data) != {"message"}:
                return error("VALIDATION_ERROR", "Invalid message")
            shown, reward, done = game.act(data["message"])
        else:
            return error("UNKNOWN_TYPE", f"Unknown message type: {asked['type']}")
        return {"type": "observation", "data": {"observation": shown, "reward": reward, "done": done}}

    async def session(socket: WebSocket) -> None:
        await socket.accept()
        if len(sessions) >= most:
            await socket.send_json(error("CAPACITY_REACHED", f"{most} of {most} sessions are active"))
            await socket.close()
            return
        game = Counting()
        sessions.add(id(game))
        try:
            while True:
                try:
                    asked = json.loads(await socket.receive_text())
                except json.JSONDecodeError as wrong:
                    await socket.send_json(error("INVALID_JSON", f"Invalid JSON: {wrong}"))
                    continue
                if asked["type"] == "close":
                    break
                try:
                    await socket.send_json(answer(game, asked))
                except RuntimeError as wrong:
                    await socket.send_json(error("EXECUTION_ERROR", str(wrong)))
        except WebSocketDisconnect:
            pass
        finally:
            sessions.discard(id(game))

    return Starlette(routes=[WebSocketRoute("/ws", session)])


def package(most: int) -> Any:
    from openenv.core.env_server import Action, Environment, Observation, State, create_app

    class Said(Action):
        message: str

    class Shown(Observation):
        text: str
        hint: str | None = None

    class Count(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.game = Counting()

        def reset(self, seed: int = 0, episode_id: str | None = None, by: int = 1) -> Shown:
            return Shown(**self.game.begin(seed, by))

        def step(self, action: Said) -> Shown:
            shown, reward, done = self.game.act(action.message)
            return Shown(**shown, reward=reward, done=done)

        @property
        def state(self) -> State:
            return State(step_count=self.game.steps)

    return create_app(Count, Said, Shown, max_concurrent_envs=most)


@contextmanager
def serving(most: int) -> Iterator[str]:
    """The address of a server of its own process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    python = os.environ.get("VALOR_OPENENV_PYTHON", sys.executable)
    process = subprocess.Popen([python, __file__, str(port), str(most)])
    for _ in range(600):
        assert process.poll() is None
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


if __name__ == "__main__":
    made = (package if importlib.util.find_spec("openenv") else frames)(int(sys.argv[2]))
    uvicorn.run(made, port=int(sys.argv[1]), log_level="warning")
