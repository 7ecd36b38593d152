"""The loop of text environments: the policy acts and the environment answers, until the episode is done."""

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

    Its score is the sum of its steps' rewards and of the environment's score at the end.
    """

    grades = True

    def __init__(self, context: LoopContext) -> None:
        super().__init__(context)
        rollout = context.config.actor_rollout_ref.rollout
        if rollout.agent.environment is None:
            raise UserError(f"environment_agent needs {_KEY}")
        self._name = rollout.agent.environment
        self._make = find_environment(self._name, rollout.agent.environment_kwargs)
        self._most_turns, self._seconds = rollout.multi_turn.most_turns, rollout.multi_turn.tool_timeout
        self._runner = ToolRunner()
        trial = partial(self._call, self._make(), asyncio.Lock())  # a mistake is reported before the run
        with ThreadPoolExecutor(1) as thread:  # an event loop may be running here
            thread.submit(asyncio.run, self._close(trial)).result()

    async def run(self, task: Task, generate: Generate) -> Episode:
        environment = await self._runner.run(self._make, {}, self._seconds, "the constructor")
        call = partial(self._call, environment, asyncio.Lock())
        try:
            opening = await call("open", task.row)
            if opening is None or isinstance(opening, str):
                messages = with_opening(task.row["messages"], opening)
            else:
                messages = self.chat.safe(list(opening))
            talk = Conversation(self.chat, messages)
            play = self.play(task, generate, talk.token_ids)
            if play.room < 1:
                size = f"it begins with {len(play.row)} tokens"
                raise EpisodeFailed(f"{size}, which leaves no room for a turn: raise data.max_prompt_length")
            reason = await self._turns(play, talk, call)
            outcome = await call("score")
        finally:
            await self._close(call)
        return play.end(reason, None if outcome is None else float(outcome), {"environment": self._name})

    async def _turns(self, play: Play, talk: Conversation, call: Call) -> EpisodeEnd:
        """Play until the episode ends, and return why. A turn that a limit cuts off reaches the environment too:
        otherwise a policy that never ends would never lose."""
        while True:
            output = await play.turn()
            text = talk.answer(output)
            if output.finish_reason == "abort":
                return "abort"
            step = await call("step", text)
            if not isinstance(step, tuple) or not 1 <= len(step) <= len(Step._fields):
                raise EpisodeFailed(f"step() returned {type(step).__name__}, and not a Step")
            messages, reward, done = Step(*step)
            play.reward(float(reward))
            if done:
                return "stop"
            if output.finish_reason != "stop":
                return output.finish_reason
            if len(play.turns) >= self._most_turns:
                return "turns"
            if not play.tell(talk, [{"role": "user", "content": messages}] if isinstance(messages, str) else messages):
                return "length"

    async def _close(self, call: Call) -> None:
        try:
            await call("close")
        except ToolFailed as failure:
            _log.warning("%s: %s", self._name, failure)

    async def _call(self, environment: TextEnvironment, lock: asyncio.Lock, method: str, *arguments: Any) -> Any:
        seconds = (method == "open" and environment.open_seconds) or self._seconds
        function = partial(getattr(environment, method), *arguments)
        return valid_text(await self._runner.run(function, {}, seconds, f"{method}()", lock))


def find_environment(name: str, kwargs: Mapping[str, Any]) -> Callable[[], TextEnvironment]:
    """The constructor of an environment. UserError: there is none of that name, or it does not take the arguments."""
    cls = load_object(name, _KEY)
    if not (isinstance(cls, type) and issubclass(cls, TextEnvironment)):
        raise UserError(f"{_KEY}={name}: is no environment: derive it from valor.agents.TextEnvironment")

    def make() -> TextEnvironment:
        try:
            return cls(**kwargs)
        except TypeError as error:
            raise UserError(f"{_KEY}={name}: cannot be made with these environment_kwargs ({error})") from None

    return make
