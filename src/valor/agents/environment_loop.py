"""The loop of text environments: the policy acts and the environment answers, until it says that it is over."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from valor.agents.chat import Conversation
from valor.agents.environment import Step, TextEnvironment
from valor.agents.episode import Episode, EpisodeEnd, EpisodeFailed
from valor.agents.formats import valid_text
from valor.agents.loops import AgentLoop, Generate, LoopContext, Play, Task, register_loop
from valor.agents.tool_loop import with_opening
from valor.agents.tool_runner import ToolFailed, ToolRunner
from valor.errors import UserError
from valor.user_files import load_object

_log = logging.getLogger(__name__)
_KEY = "rollout.agent.environment"

Call = Callable[..., Awaitable[Any]]


@register_loop("environment_agent")
class EnvironmentLoop(AgentLoop):
    """The environment of `rollout.agent.environment` judges the episode.

    Its score is the sum of its steps' rewards and of what the environment says at the end.
    """

    grades = True

    def __init__(self, context: LoopContext) -> None:
        super().__init__(context)
        rollout = context.config.actor_rollout_ref.rollout
        name = rollout.agent.environment
        if name is None:
            raise UserError(f"environment_agent needs {_KEY}")
        self._name, self._make = name, find_environment(name, rollout.agent.environment_kwargs)
        self._most_turns, self._seconds = rollout.multi_turn.most_turns, rollout.multi_turn.tool_timeout
        self._runner = ToolRunner()
        first = self._make()  # a mistake is told before the run
        with ThreadPoolExecutor(1) as apart:  # an event loop may be running here
            apart.submit(asyncio.run, self._close(partial(self._call_method, first, asyncio.Lock()))).result()

    async def run(self, task: Task, generate: Generate) -> Episode:
        environment = await self._call(self._make, "the constructor", self._seconds)
        call = partial(self._call_method, environment, asyncio.Lock())
        try:
            opening = await call("open", task.row)
            if opening is None or isinstance(opening, str):
                opening = with_opening(task.row["messages"], opening)
            else:
                opening = self.chat.safe(list(opening))
            talk = Conversation(self.chat, opening)
            play = self.play(task, generate, talk.token_ids)
            if play.room < 1:
                raise EpisodeFailed(
                    f"it begins with {len(play.row)} tokens, which leaves no room for a turn: raise "
                    "data.max_prompt_length"
                )
            reason = await self._turns(play, talk, call)
            outcome = await call("score")
        finally:
            await self._close(call)
        return play.end(reason, None if outcome is None else float(outcome), {"environment": self._name})

    async def _turns(self, play: Play, talk: Conversation, call: Call) -> EpisodeEnd:
        """Play until the episode ends; why it did. A turn that a limit cuts off reaches the environment too: otherwise
        a policy that never ends would never lose."""
        while True:
            output = await play.turn()
            text = talk.answer(output)
            if output.finish_reason == "abort":
                return "abort"
            step = _step(await call("step", text))
            play.reward(float(step.reward))
            if step.done:
                return "stop"
            if output.finish_reason != "stop":
                return output.finish_reason
            if len(play.turns) >= self._most_turns:
                return "turns"
            said = step.messages
            if not play.tell(talk, [{"role": "user", "content": said}] if isinstance(said, str) else said):
                return "length"

    async def _close(self, call: Call) -> None:
        try:
            await call("close")
        except EpisodeFailed as failure:
            _log.warning("%s: %s", self._name, failure)

    async def _call_method(self, environment: TextEnvironment, lock: asyncio.Lock, method: str, *arguments: Any) -> Any:
        seconds = environment.open_seconds if method == "open" else None
        function = partial(getattr(environment, method), *arguments)
        return await self._call(function, f"{method}()", seconds or self._seconds, lock)

    async def _call(
        self, function: Callable[..., Any], what: str, seconds: float, lock: asyncio.Lock | None = None
    ) -> Any:
        try:
            return valid_text(await self._runner.run(function, {}, seconds, lock))
        except ToolFailed as failure:
            if isinstance(failure.__cause__, UserError):
                raise failure.__cause__ from None
            raise EpisodeFailed(f"{what} {failure}") from failure.__cause__


def find_environment(name: str, kwargs: Mapping[str, Any]) -> Callable[[], TextEnvironment]:
    """What makes an environment of that name. UserError: there is none, or it does not take these arguments."""
    cls = load_object(name, _KEY)
    if not (isinstance(cls, type) and issubclass(cls, TextEnvironment)):
        raise UserError(f"{_KEY}={name}: is no environment: derive it from valor.agents.TextEnvironment")

    def made() -> TextEnvironment:
        try:
            return cls(**kwargs)
        except TypeError as error:
            raise UserError(f"{_KEY}={name}: cannot be made with these environment_kwargs ({error})") from None

    return made


def _step(given: Any) -> Step:
    if not isinstance(given, tuple) or not 1 <= len(given) <= len(Step._fields):
        raise EpisodeFailed(f"step() returned {type(given).__name__}, and not a Step")
    return Step(*given)
