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
    """Tools of `rollout.multi_turn`, with calls in its format."""

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
            opening = await toolbox.open(task.row)
            talk = Conversation(self.chat, with_opening(task.row["messages"], opening), toolbox.schemas)
            play = self.play(task, generate, talk.token_ids)
            calls: list[dict[str, Any]] = []
            reason = await self._turns(play, talk, toolbox, calls)
            reward = await toolbox.rewards()
        finally:
            await toolbox.close()
        info = {"calls": calls, **({} if self.grades or reward is None else {"tool_reward": reward})}
        return play.end(reason, reward if self.grades else None, info)

    async def _turns(self, play: Play, talk: Conversation, toolbox: Toolbox, calls: list[dict[str, Any]]) -> EpisodeEnd:
        """Play until the episode ends, and return why. Calls and their results are appended to `calls`."""
        while True:
            output = await play.turn()
            parsed = self._parse(talk.answer(output), toolbox.schemas)
            if parsed.calls:
                play.say(parsed.content)
            if output.finish_reason != "stop":
                return output.finish_reason
            if not parsed.calls:
                return "stop"
            if len(play.turns) >= self._most_turns:
                return "turns"
            results = await toolbox.call_all(parsed.calls)
            for call, result in zip(parsed.calls, results, strict=False):
                calls.append(call_record(len(play.turns), call, result))
                play.reward(result.reward)
            answers = [_tool_message(*pair) for pair in zip([*parsed.calls, None], results, strict=False)]
            if not play.tell(talk, answers):
                return "length"


def with_opening(messages: Sequence[Message], opening: str | None) -> list[Message]:
    """The prompt for a Conversation: an environment's first text joins its last message."""
    return [*messages[:-1], {**messages[-1], "opening": opening}] if opening else list(messages)


def call_record(turn: int, call: Call, result: ToolResult) -> dict[str, Any]:
    """A call and its result, for metrics and reports."""
    name, arguments = (call.name, call.arguments) if isinstance(call, ToolCall) else (None, call.text)
    return {
        "turn": turn,
        "name": name,
        "arguments": arguments,
        **{f.name: getattr(result, f.name) for f in fields(result)},
    }


def _tool_message(call: Call | None, result: ToolResult) -> Message:
    name = {"name": call.name} if isinstance(call, ToolCall) else {}
    return {"role": "tool", **name, "content": result.text}
