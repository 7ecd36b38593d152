"""Text environments, and their loop: the policy acts and the environment answers, until the episode is done."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from valor.agents.chat import Conversation, Message
from valor.agents.compaction import Compaction
from valor.agents.episode import Episode, EpisodeEnd, EpisodeFailed
from valor.agents.formats import valid_text
from valor.agents.loops import AgentLoop, Generate, LoopContext, Play, Task, register_loop
from valor.agents.tool_loop import converse, with_opening
from valor.agents.tool_runner import release, run_tool
from valor.errors import UserError
from valor.rollout.base import FinishReason
from valor.user_files import load_object

_KEY = "rollout.agent.environment"

Call = Callable[..., Awaitable[Any]]


class Step(NamedTuple):
    """An answer to the policy: messages, or a text as one message of the user; the reward of the turn; and whether
    the episode is over, so that nobody reads the messages."""

    messages: Sequence[Message] | str
    reward: float = 0.0
    done: bool = False


class TextEnvironment:
    """The world of one episode. Derive from it, and name the class in `rollout.agent.environment`.

    An object is made for each episode, with `rollout.agent.environment_kwargs`. Its methods never overlap. They may be
    coroutine functions, which must not block; others run in threads, not always in the same one. What a method raises
    is the error of its episode, but a UserError ends the run.
    """

    open_seconds: float | None = None
    """Time limit of `open`; None: that of any call, `rollout.multi_turn.tool_timeout`."""

    hidden: Mapping[str, Any] = {}
    """What a critic may read and the policy may not (`critic.prompt_template`), set by `open`: it must not depend on
    the policy's answers."""

    def open(self, row: Mapping[str, Any]) -> Any:
        """Begin. Returns the messages that the policy reads first, in place of the row's; a text to be added to the
        row's last message; or None: the row's messages as they are.

        `row`: messages, ground_truth, data_source, extra_info, uid, and episode_key, three integers of this sample
        alone: random numbers drawn from it, as `random.Random(str(row["episode_key"]))`, repeat in a resumed run.
        """

    def step(self, text: str) -> Any:
        """Answer the policy's text: a Step, or a tuple (messages, reward, done)."""
        raise NotImplementedError

    def score(self) -> Any:
        """The reward of the episode beside its steps', computed when it has ended for whatever reason. None: a grader
        decides, by the row's data_source."""
        return 0.0

    def close(self) -> Any:
        """Release everything; also called when `open` has failed."""


def row_number(row: Mapping[str, Any]) -> int:
    """The seed of a game: `seed` of the row's extra_info, else the row's number in its data files. The samples of a
    prompt play the same game."""
    seed = row["extra_info"].get("seed")
    return int(row["uid"].rpartition(":")[2] if seed is None else seed)


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
        self._compaction = Compaction(context) if rollout.agent.compaction.enable else None
        trial = partial(self._call, self._make(), asyncio.Lock())  # a mistake is reported before the run
        with ThreadPoolExecutor(1) as thread:  # an event loop may be running here
            thread.submit(asyncio.run, release(trial("close"))).result()

    async def run(self, task: Task, generate: Generate) -> Episode:
        environment = await run_tool(self._make, {}, self._seconds, "the constructor")
        call = partial(self._call, environment, asyncio.Lock())
        try:
            opening = await call("open", task.row)
            if opening is None or isinstance(opening, str):
                messages = with_opening(task.row["messages"], opening)
            else:
                messages = self.chat.safe(_texts(opening))
            hidden = valid_text(dict(environment.hidden))
            talk = Conversation(self.chat, messages)
            play = self.play(task, generate, talk.token_ids)
            reason = await converse(play, talk, partial(self._answer, play, call), self._compaction)
            outcome = await call("score")
        finally:
            await release(call("close"))
        info = {"environment": self._name, **({"hidden": hidden} if hidden else {})}
        return play.end(reason, None if outcome is None else float(outcome), info)

    async def _answer(
        self, play: Play, call: Call, text: str, finish_reason: FinishReason
    ) -> list[Message] | EpisodeEnd:
        """The environment's messages. A turn that a limit cuts off reaches it too: otherwise a policy that never ends
        would never lose."""
        if finish_reason == "abort":
            return "abort"
        step = await call("step", text)
        if not isinstance(step, tuple) or not 1 <= len(step) <= len(Step._fields):
            raise EpisodeFailed(f"step() returned {type(step).__name__}, and not a Step")
        messages, reward, done = Step(*step)
        play.reward(float(reward))
        if done or finish_reason != "stop":
            return "stop" if done else finish_reason
        if play.num_turns >= self._most_turns:
            return "turns"
        return [{"role": "user", "content": messages}] if isinstance(messages, str) else _texts(messages)

    async def _call(self, environment: TextEnvironment, lock: asyncio.Lock, method: str, *arguments: Any) -> Any:
        seconds = (method == "open" and environment.open_seconds) or self._seconds
        function = partial(getattr(environment, method), *arguments)
        return valid_text(await run_tool(function, {}, seconds, f"{method}()", lock))


def _texts(messages: Iterable[Message]) -> list[Message]:
    """The messages of an environment. EpisodeFailed: one has parts, such as an image, and not text."""
    shown = list(messages)
    if any(isinstance(message.get("content"), list) for message in shown):
        raise EpisodeFailed("the environment answered with parts of a message, and only text is supported")
    return shown


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
