"""The loop of chat models with tools: the policy speaks, its calls are answered, until a turn has none."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from valor.agents.chat import Conversation, Message
from valor.agents.compaction import Compaction
from valor.agents.episode import Episode, EpisodeEnd, EpisodeFailed
from valor.agents.formats import FORMATS, Call, ToolCall
from valor.agents.loops import AgentLoop, Generate, LoopContext, Play, Task, copied, register_loop
from valor.agents.tool_files import load_sources
from valor.agents.tools import Toolbox, ToolResult, Toolset
from valor.rollout.base import FinishReason


@register_loop("tool_agent")
class ToolLoop(AgentLoop):
    """Tools of `rollout.multi_turn` and `rollout.agent.environment`; calls are in `multi_turn.format`."""

    def __init__(self, context: LoopContext) -> None:
        super().__init__(context)
        rollout = context.config.actor_rollout_ref.rollout
        multi, agent = rollout.multi_turn, rollout.agent
        sources = load_sources(
            multi.tool_config_path, multi.function_tool_path, agent.environment, agent.environment_kwargs
        )
        self._toolset = Toolset(sources, multi)
        self._parse, self._most_turns = FORMATS[multi.format], multi.most_turns
        self._compaction = Compaction(context) if agent.compaction.enable else None
        self.schemas = self._toolset.schemas
        self.grades = any(source.judges for source in sources)

    async def run(self, task: Task, generate: Generate) -> Episode:
        toolbox = self._toolset.toolbox()
        calls: list[dict[str, Any]] = []
        try:
            messages = with_opening(task.row["messages"], await toolbox.open(task.row))
            talk = Conversation(self.chat, messages, toolbox.schemas)
            play = self.play(task, generate, talk.token_ids)
            reason = await converse(play, talk, partial(self._answer, play, toolbox, calls), self._compaction)
            reward = await toolbox.rewards()
        finally:
            await toolbox.close()
        info = {"calls": calls, **({} if self.grades or reward is None else {"tool_reward": reward})}
        return play.end(reason, reward if self.grades else None, info)

    async def _answer(
        self, play: Play, toolbox: Toolbox, records: list[dict[str, Any]], text: str, finish_reason: FinishReason
    ) -> list[Message] | EpisodeEnd:
        """The results of the calls in a text. Calls and results are appended to `records`."""
        calls, content = self._parse(text, toolbox.schemas)
        if calls:
            play.say(content)
        if finish_reason != "stop" or not calls:
            return finish_reason
        if play.num_turns >= self._most_turns:
            return "turns"
        results = await toolbox.call_all(calls)
        for call, result in zip(calls, results, strict=False):
            records.append(call_record(len(play.turns), call, result))
            play.reward(result.reward)
        return [_tool_message(*pair) for pair in zip([*calls, None], results, strict=False)]


async def converse(
    play: Play,
    talk: Conversation,
    answer: Callable[[str, FinishReason], Awaitable[list[Message] | EpisodeEnd]],
    compaction: Compaction | None = None,
) -> EpisodeEnd:
    """Alternate turns of the policy with `answer(text, finish_reason)`: messages, or why the episode ends here."""
    play.cuts = None if compaction is None else []
    if play.room < (1 if compaction is None else compaction.least):
        size = f"it begins with {len(play.row)} tokens"
        raise EpisodeFailed(f"{size}, which leaves no room for a turn: raise data.max_prompt_length")
    while True:
        cuts = compaction if compaction is not None and compaction.applies(play) else None
        output = await play.turn(most=play.room - (0 if cuts is None else cuts.reserve))
        reply = await answer(talk.answer(output), output.finish_reason)
        if not isinstance(reply, list):
            return reply
        before = talk if cuts is None else copied(talk)
        if play.tell(talk, reply, 1 if cuts is None else cuts.least):
            continue
        end = "length" if cuts is None else await cuts.cut(play, before, reply)
        if end is not None:
            return end
        talk = before


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
