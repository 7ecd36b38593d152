"""Episodes played by programs that own their loop: a function or a command, which calls an OpenAI-compatible server."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

from valor.agents.episode import Episode, EpisodeFailed
from valor.agents.gateway import Gateway, Session
from valor.agents.http_server import listen, require_libraries
from valor.agents.loops import AgentLoop, Generate, LoopContext, Task, register_loop
from valor.agents.tool_runner import run_tool
from valor.errors import UserError
from valor.user_files import load_object

_KEY = "actor_rollout_ref.rollout.agent.gateway"
_LOOK_SECONDS = 0.05  # between two looks at whether a command has ended
_MAX_OUTPUT = 2**20  # bytes that are read of a command's output


@register_loop("gateway_agent")
class GatewayLoop(AgentLoop):
    """Each episode is one call of `rollout.agent.gateway.function`, or one run of its `command`."""

    shows_images = False

    def __init__(self, context: LoopContext) -> None:
        super().__init__(context)
        rollout = context.config.actor_rollout_ref.rollout
        self._config = config = rollout.agent.gateway
        require_libraries()
        if (config.function is None) == (config.command is None):
            raise UserError(f"agent gateway_agent needs {_KEY}.function or {_KEY}.command, and not both")
        self._function = None if config.function is None else load_object(config.function, f"{_KEY}.function")
        self.chat.use_format(rollout.multi_turn.format)

    @cached_property
    def _gateway(self) -> Gateway:
        direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        # No proxy that the environment names reaches this process; programs ask with clients of their own.
        os.environ |= dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, (direct, "127.0.0.1"))))
        return Gateway(listen("127.0.0.1", 0))

    def close(self) -> None:
        if "_gateway" in vars(self):
            self._gateway.close()

    async def run(self, task: Task, generate: Generate) -> Episode:
        session = Session(task, generate, self.chat, self.context.limits, self.chat.parse)
        base_url = self._gateway.add(session)
        try:
            if self._function is None:
                reward = await self._execute(base_url, session.key, task.row)
            else:
                call = partial(self._function, base_url, session.key, task.row)
                reward = await run_tool(call, {}, self._config.timeout, "the function")
        finally:
            self._gateway.remove(base_url)
            session.close()
        episode = session.end(None if reward is None else float(reward))
        if episode is None:
            raise EpisodeFailed("the program ended without a request")
        return episode

    async def _execute(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> float | None:
        """The number in the last line of the command's output, if it is one. EpisodeFailed: it ended with an error."""
        assert self._config.command is not None
        pipe, seconds = asyncio.subprocess.PIPE, self._config.timeout
        environment = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        process = await asyncio.create_subprocess_shell(
            self._config.command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
        )
        talk = asyncio.ensure_future(process.communicate(json.dumps(row, default=str).encode()))
        try:
            async with asyncio.timeout(seconds):
                while process.returncode is None:  # what it has started may hold its output open
                    await asyncio.wait({talk}, timeout=_LOOK_SECONDS)
                _end(process.pid)
                output, errors = await talk
        except TimeoutError:
            raise EpisodeFailed(f"the program did not end within {seconds:g} s") from None
        finally:
            _end(process.pid)
        if process.returncode:
            raise EpisodeFailed(f"the command ended with exit code {process.returncode}: {_last_line(errors)[:300]}")
        try:
            return float(_last_line(output))
        except ValueError:
            return None


def _end(leader: int) -> None:
    """End a process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _last_line(output: bytes) -> str:
    return output[-_MAX_OUTPUT:].decode(errors="replace").strip().rpartition("\n")[2]
