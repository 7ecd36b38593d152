"""The loop of chat models with tools: the policy speaks, its calls are answered, until a turn has none."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from valor.agents.chat import Conversation, Message
from valor.agents.episode import Episode, EpisodeEnd
from valor.agents.formats import FORMATS, Call, ToolCall
from valor.agents.loops import AgentLoop, Generate, LoopContext, Play, Task, register_loop
from valor.agents.tool_files import load_sources
from valor.agents.tools import Toolbox, ToolResult, Toolset


@register_loop("tool_agent")
class ToolLoop(AgentLoop):
    """Tools of `rollout.multi_turn`, their calls in its format, each turn told by the chat template."""

    def __init__(self, context: LoopContext) -> None:
        super().__init__(context)
        multi = context.config.actor_rollout_ref.rollout.multi_turn
        sources = load_sources(multi.tool_config_path, multi.function_tool_path, multi.environment)
        self._toolset = Toolset(sources, multi)
        self._parse, self._most_turns = FORMATS[multi.format], multi.most_turns
        self.schemas = self._toolset.schemas
        self.grades = any(source.judges for source in sources)

    async def run(self, task: Task, generate: Generate) -> Episode:
        toolbox = self._toolset.toolbox()
        try:
            said = await toolbox.open(task.row)
            talk = Conversation(self.chat, with_opening(task.row["messages"], said), toolbox.schemas)
            play = self.play(task, generate, talk.token_ids)
            calls: list[dict[str, Any]] = []
            reason = await self._turns(play, talk, toolbox, calls)
            reward = await toolbox.rewards()
        finally:
            await toolbox.close()
        info = {"calls": calls, **({} if self.grades or reward is None else {"tool_reward": reward})}
        return play.end(reason, reward if self.grades else None, info)

    async def _turns(self, play: Play, talk: Conversation, toolbox: Toolbox, calls: list[dict[str, Any]]) -> EpisodeEnd:
        """Play until the episode ends; why it did. Calls and their results are appended to `calls`."""
        while True:
            output = await play.turn()
            text = talk.answer(output)
            asked, content = self._parse(text, toolbox.schemas)
            if asked:
                play.say(content)
            if output.finish_reason != "stop":
                return output.finish_reason
            if not asked:
                return "stop"
            if len(play.turns) >= self._most_turns:
                return "turns"
            results = await toolbox.call_all(asked)
            for call, result in zip(asked, results, strict=False):
                calls.append(call_record(len(play.turns), call, result))
                play.reward(result.reward)
            if not play.tell(talk, [_tool_message(*pair) for pair in zip([*asked, None], results, strict=False)]):
                return "length"


def with_opening(messages: Sequence[Message], said: str | None) -> list[Message]:
    """The prompt for a Conversation, with what an environment says at the start at the end of its last message."""
    if not said:
        return list(messages)
    *before, last = messages
    return [*before, {**last, "opening": said}]


def call_record(turn: int, call: Call, result: ToolResult) -> dict[str, Any]:
    """What is kept of a call, for metrics, for reading and for playing an episode again."""
    name, arguments = (call.name, call.arguments) if isinstance(call, ToolCall) else (None, call.text)
    answered = {field.name: getattr(result, field.name) for field in fields(result)}
    return {"turn": turn, "name": name, "arguments": arguments, **answered}


def _tool_message(call: Call | None, result: ToolResult) -> Message:
    name = {"name": call.name} if isinstance(call, ToolCall) else {}
    return {"role": "tool", **name, "content": result.text}
