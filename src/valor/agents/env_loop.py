"""The loop of environments and tools: the policy speaks and is answered, until nothing is left to say."""

from collections.abc import Awaitable, Callable
from dataclasses import fields
from functools import partial
from typing import Any

from valor.agents.chat import Conversation, Message
from valor.agents.compaction import Compaction
from valor.agents.env import env_source
from valor.agents.episode import Episode, EpisodeEnd, EpisodeFailed
from valor.agents.formats import Call, Parsed, ToolCall, call_id
from valor.agents.loops import AgentLoop, Generate, LoopContext, Play, Task, copied, register_loop
from valor.agents.taskset import env_of_run
from valor.agents.tool_files import load_sources
from valor.agents.tools import Toolbox, ToolResult, Toolset
from valor.errors import UserError
from valor.rollout.base import FinishReason


@register_loop("environment_agent")
@register_loop("tool_agent")
class EnvLoop(AgentLoop):
    """Plays the environment of `rollout.agent.environment` or `data.taskset`, with its tools and those of
    `rollout.multi_turn`; calls are in `multi_turn.format`.

    A turn with calls is answered by tools, any other by the environment; where there is none it ends the episode. The
    score is the sum of the turns' rewards and of the environment's score.
    """

    def __init__(self, context: LoopContext) -> None:
        super().__init__(context)
        rollout = context.config.actor_rollout_ref.rollout
        multi, agent = rollout.multi_turn, rollout.agent
        sources = load_sources(multi.tool_config_path, multi.function_tool_path)
        name, make = agent.environment or context.config.data.taskset, env_of_run(context.config)
        if make is not None:
            sources.append(env_source(make))
        elif not multi.enable:
            raise UserError("environment_agent needs rollout.agent.environment or data.taskset")
        self._toolset = Toolset(sources, multi)
        self.schemas = self._toolset.schemas
        self.chat.use_format(multi.format)
        self._parse = self.chat.format if multi.enable or self.schemas else None
        self._most_turns = multi.most_turns
        self._compaction = Compaction(context) if agent.compaction.enable else None
        self._facts = {} if name is None else {"environment": name}
        self.grades = any(source.judges for source in sources)

    async def run(self, task: Task, generate: Generate) -> Episode:
        toolbox = Toolbox(self._toolset)
        calls: list[dict[str, Any]] = []
        try:
            opening = await toolbox.open(task.row)
            toolbox.chat = self.chat
            messages = self.chat.row_messages(task.row)
            if toolbox.messages is not None:
                messages = self.chat.safe(self.chat.read(toolbox.messages, "the environment"))
            talk = Conversation(self.chat, messages, toolbox.schemas, opening)
            play = self.play(task, generate, talk.token_ids)
            play.cuts = None if self._compaction is None else []
            play.take_images(talk)
            toolbox.play, toolbox.converse = play, partial(self._delegated, play, calls)
            answer = partial(self._answer, play, toolbox, calls, self._most_turns)
            reason = await converse(play, talk, answer, self._compaction)
            reward, unscored = await toolbox.rewards(), await toolbox.rewards(scored=False)
        finally:
            await toolbox.close()
        info = self._facts | ({"calls": calls} if self._parse is not None else {})
        info |= {"hidden": toolbox.hidden} if toolbox.hidden else {}
        info |= {} if unscored is None else {"tool_reward": unscored}
        return play.end(reason, reward if self.grades else None, info)

    async def _delegated(
        self, play: Play, records: list[dict[str, Any]], talk: Conversation, toolbox: Toolbox, most_turns: int
    ) -> tuple[EpisodeEnd, str]:
        """A conversation of a sub-agent: why it ended, and what it said last."""
        texts: list[str] = []

        async def answer(text: str, finish_reason: FinishReason) -> list[Message] | EpisodeEnd:
            texts.append(text)
            return await self._answer(play, toolbox, records, most_turns, text, finish_reason)

        return await converse(play, talk, answer), texts[-1]

    async def _answer(
        self,
        play: Play,
        toolbox: Toolbox,
        records: list[dict[str, Any]],
        most_turns: float,
        text: str,
        finish_reason: FinishReason,
    ) -> list[Message] | EpisodeEnd:
        """What the policy reads after a text. Calls and results are appended to `records`.

        A turn that a limit cuts off has reached the environment too: otherwise a policy that never ends would never
        lose.
        """
        if finish_reason == "abort":
            return "abort"
        calls, content = self._parse(text, toolbox.schemas) if self._parse is not None else Parsed([], text)
        if calls:
            play.say(content)
        if toolbox.heard is not None and await toolbox.heard(text):
            return "stop"
        step: Any = None  # a Step of the environment's
        if not calls and toolbox.step is not None:
            step = await toolbox.step(text)
            play.reward(float(step.reward or 0.0))
            if step.done:
                return "stop"
        if finish_reason != "stop" or (step is None and not calls):
            return finish_reason
        if play.num_turns >= most_turns:
            return "turns"
        if step is not None and isinstance(step.messages, str):
            return [{"role": "user", "content": step.messages}]
        if step is not None:
            return self.chat.read(step.messages, "the environment")
        turn = len(play.turns)
        results = await toolbox.call_all(calls)
        for call, result in zip(calls, results, strict=False):
            records.append(call_record(turn, call, result))
            play.reward(result.reward, turn)
        return [_tool_message(turn, i, *pair) for i, pair in enumerate(zip(calls, results, strict=False))]


async def converse(
    play: Play,
    talk: Conversation,
    answer: Callable[[str, FinishReason], Awaitable[list[Message] | EpisodeEnd]],
    compaction: Compaction | None = None,
) -> EpisodeEnd:
    """Alternate turns of the policy with `answer(text, finish_reason)`: messages, or why the episode ends here."""
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


def call_record(turn: int, call: Call, result: ToolResult) -> dict[str, Any]:
    """A call and its result, for metrics and reports."""
    name, arguments = (call.name, call.arguments) if isinstance(call, ToolCall) else (None, call.text)
    return {
        "turn": turn,
        "name": name,
        "arguments": arguments,
        **{f.name: getattr(result, f.name) for f in fields(result)},
    }


def _tool_message(turn: int, number: int, call: Call, result: ToolResult) -> Message:
    name = {"name": call.name} if isinstance(call, ToolCall) else {}
    shown = [{"type": "image", "file": file} for file in result.images]
    return {
        "role": "tool",
        **name,
        "tool_call_id": call_id(call, turn, number),
        "content": [*shown, {"type": "text", "text": result.text}] if shown else result.text,
    }
