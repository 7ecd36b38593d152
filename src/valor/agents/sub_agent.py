"""A tool whose answer is an episode of the same policy: `class_name: sub_agent` in a tools file.

The sub-agent reads a prompt of its own and has the other tools. Its turns are rows of the episode that called it: they
are trained by that episode's outcome, over which advantages run in the order of time, and by a reward of their own.
"""

import asyncio
from collections.abc import Callable
from copy import copy
from typing import Any

from valor.agents.chat import Conversation
from valor.agents.tools import Toolbox, ToolResult, name_of
from valor.errors import UserError
from valor.rewards.answers import after_thinking
from valor.user_files import load_object


def make_sub_agent(max_turns: int = 8, system: str | None = None, reward: str | None = None) -> Callable[..., Any]:
    """The tool `delegate`. `system`: the message of the system that the sub-agent reads before its task; `reward`: a
    function (task, answer) -> float, as file.py:name, whose value is added on the last token of the sub-agent.

    UserError: no turns, or no such function.
    """
    if max_turns < 1:
        raise UserError(f"sub_agent: max_turns={max_turns} must be at least 1")
    judge = None if reward is None else load_object(reward, "sub_agent's reward")
    before = [{"role": "system", "content": system}] if system else []

    def delegate(task: str) -> str:
        """Have an assistant with the same tools, and no memory of this conversation, do a task. Answers its last words.

        Args:
            task: All that the assistant needs to know.
        """
        raise NotImplementedError("its toolbox plays it")

    async def play(toolbox: Toolbox, task: str) -> ToolResult:
        assert toolbox.play is not None and toolbox.converse is not None, "a loop has opened it"
        tools = copy(toolbox)
        tools.schemas = [schema for schema in toolbox.schemas if name_of(schema) not in toolbox.sub_agents]
        tools.calls = {name: call for name, call in toolbox.calls.items() if name not in toolbox.sub_agents}
        tools.step = tools.heard = None
        chat, episode = toolbox.chat, toolbox.play
        async with episode.alone:  # turns of an episode are in the order of time
            talk = Conversation(chat, [*before, *chat.safe([{"role": "user", "content": task}])], tools.schemas)
            back = episode.leave(talk.token_ids)
            if back is None:
                return ToolResult("Error: the task is too long.", error="failed")
            try:
                reason, text = await toolbox.converse(talk, tools, episode.num_turns + max_turns)
                answer = after_thinking(text).strip()
                if judge is not None:
                    episode.reward(float(await asyncio.to_thread(judge, task, answer)))
            finally:
                back()
        return ToolResult(answer, error=None if reason == "stop" else "failed", metrics={"end": reason})

    delegate.plays = play  # type: ignore[attr-defined]
    return delegate
