"""The contract of tasks: what begins an episode, answers the policy, gives it tools and says what the episode is worth.

Text games, classes whose methods are tools, and the task sets of other libraries are all an `Env`; `env_loop` plays it.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

from valor.agents.chat import Message
from valor.agents.episode import EpisodeFailed
from valor.agents.formats import Schema, valid_text
from valor.agents.tool_runner import exception_text, release, run_tool
from valor.agents.tool_sources import as_hinted, schema_of
from valor.agents.tools import Toolbox, ToolSource, text_and_images
from valor.data.messages import kind_of
from valor.errors import UserError
from valor.user_files import load_object

_KEY = "rollout.agent.environment"
_CLOSE_SECONDS = 30.0  # of the object that is made before a run
_NO_TOOLS = ("reset", "get_reward", "close")


class Step(NamedTuple):
    """An answer to the policy: messages, or a text as one message of the user; the reward of the turn (None: none); and
    whether the episode is over, so that nobody reads the messages. In a run with images a message's content may be a
    list of parts {"type": "text", "text": text} and {"type": "image", "image": bytes, path or PIL image}."""

    messages: Sequence[Message] | str
    reward: float | None = 0.0
    done: bool = False


class Env:
    """The world of one episode. Derive from it, and name the class in `rollout.agent.environment`.

    An object is made for each episode, with `rollout.agent.environment_kwargs`. Its methods never overlap. They may be
    coroutine functions, which must not block; others run in threads, not always in the same one. What a method raises
    is the error of its episode, but a UserError ends the run; what a tool raises is told to the policy.
    """

    tools: Sequence[str] = ()
    """Methods that the policy may call; their type hints and Google docstrings describe them."""
    grades: bool = True
    """Whether `score` is the episode's reward; else graders give it, by the row's data_source."""
    reset_seconds: float | None = None
    score_seconds: float | None = None
    """Time limits of `reset` and `score`; None: that of any call, `rollout.multi_turn.tool_timeout`."""

    hidden: Mapping[str, Any] = {}
    """What a critic may read and the policy may not (`critic.prompt_template`), set by `reset`: it must not depend on
    the policy's answers."""

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Begin. Returns the messages that the policy reads first, in place of the row's; a text to be added to the
        row's last message; or None: the row's messages as they are.

        `row`: messages, ground_truth, data_source, extra_info, uid, and episode_key, three integers of this sample
        alone: random numbers drawn from it, as `random.Random(str(row["episode_key"]))`, repeat in a resumed run.
        """

    def heard(self, text: str) -> Any:
        """Learn what the policy said, before its calls are done or `step` answers it. True ends the episode."""

    def step(self, text: str) -> Any:
        """Answer a text without calls: a Step, or a tuple (messages, reward, done). Without this method of your own
        such a text ends the episode."""
        raise NotImplementedError

    def score(self) -> Any:
        """The reward of the episode beside its steps', computed when it has ended for whatever reason. None: a grader
        decides, by the row's data_source."""
        return 0.0

    def close(self) -> Any:
        """Release everything; also called when `reset` has failed."""

    def schemas(self) -> list[Schema]:
        """OpenAI's schemas of the tools, the same in all episodes."""
        return [schema_of(self.tool(name)) for name in self.tools]

    def tool(self, name: str) -> Callable[..., Any]:
        """What a call of a tool runs, with the call's arguments."""
        return getattr(self, name)


def row_number(row: Mapping[str, Any]) -> int:
    """The seed of a game: `seed` of the row's extra_info, else the row's number in its data files. The samples of a
    prompt play the same game."""
    seed = row["extra_info"].get("seed")
    return int(row["uid"].rpartition(":")[2] if seed is None else seed)


def env_source(make: Callable[[], Env]) -> ToolSource:
    """The environments of a run, an object for each episode. UserError: none can be made."""
    try:  # a mistake is reported before the run
        trial = make()
        if isinstance(trial.tools, str):
            raise TypeError(f"tools={trial.tools!r} must be a list of methods")
        schemas, grades = trial.schemas(), trial.grades
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"the environment cannot be made: {exception_text(error)}") from error
    with ThreadPoolExecutor(1) as thread:  # an event loop may be running here
        thread.submit(asyncio.run, release(run_tool(trial.close, {}, _CLOSE_SECONDS, "close()"))).result()
    return ToolSource(schemas, partial(_episode, make), grades, always=True)


@asynccontextmanager
async def _episode(
    make: Callable[[], Env], toolbox: Toolbox, row: Mapping[str, Any], names: Sequence[str]
) -> AsyncIterator[None]:
    env, lock = await toolbox.run(make, {}, name="the constructor"), asyncio.Lock()

    async def call(method: str, *arguments: Any) -> Any:
        function = partial(getattr(env, method), *arguments)
        seconds = getattr(env, f"{method}_seconds", None)
        limit = {} if seconds is None else {"seconds": seconds}
        return valid_text(await toolbox.run(function, {}, name=f"{method}()", lock=lock, **limit))

    async def use(name: str, arguments: Mapping[str, Any]) -> Any:
        function = env.tool(name)
        return await toolbox.run(function, as_hinted(function, arguments), name=name, lock=lock)

    async def step(text: str) -> Step:
        answer = await call("step", text)
        if not isinstance(answer, tuple) or not 1 <= len(answer) <= len(Step._fields):
            raise EpisodeFailed(f"step() returned {kind_of(answer)}: return Step(messages, reward, done)")
        return Step(*answer)

    async def score() -> float | None:
        value = await call("score")
        return None if value is None else float(value)

    try:
        opening = await call("reset", row)
        if opening is None or isinstance(opening, str):
            toolbox.openings.append(opening or "")
        else:
            toolbox.messages = opening
        toolbox.hidden = valid_text(dict(env.hidden))
        toolbox.calls |= {name: partial(use, name) for name in names}
        toolbox.judges += [score] if env.grades else []
        toolbox.step = step if type(env).step is not Env.step else None
        toolbox.heard = partial(call, "heard") if type(env).heard is not Env.heard else None
        yield
    finally:
        await release(call("close"))


class Methods(Env):
    """An environment in the shape of TRL's `environment_factory`.

    `__init__` takes `kwargs`; `reset(**row)` gets the row's columns and its `extra_info`, or those of them that it
    names, and may return a text for the policy; `get_reward() -> float` and `close()` are optional; every other public
    method is a tool. UserError: a class of another shape.
    """

    def __init__(self, cls: type, kwargs: Mapping[str, Any]) -> None:
        name, methods = cls.__name__, inspect.getmembers(cls, inspect.isroutine)
        if not callable(getattr(cls, "reset", None)):
            raise UserError(
                f"environment {name} has no method reset(): it begins an episode, and takes a row's columns"
            )
        try:
            inspect.signature(cls).bind(**kwargs)
        except TypeError as error:
            raise UserError(f"environment {name} cannot be made with these environment_kwargs: {error}") from None
        self.tools = [key for key, _ in methods if not key.startswith("_") and key not in _NO_TOOLS]
        if not self.tools:
            raise UserError(f"environment {name} has no public method beside reset(): it has no tools")
        self._object = cls(**kwargs)
        self.grades = hasattr(cls, "get_reward")
        self.score = getattr(self._object, "get_reward", self.score)  # type: ignore[method-assign]
        self.close = getattr(self._object, "close", self.close)  # type: ignore[method-assign]
        begins = _begin_later if inspect.iscoroutinefunction(cls.reset) else _begin  # type: ignore[attr-defined]
        self.reset = partial(begins, self._object)  # type: ignore[method-assign]

    def tool(self, name: str) -> Callable[..., Any]:
        return getattr(self._object, name)


def _begin(environment: Any, row: Mapping[str, Any]) -> Any:
    columns = {"prompt": row.get("messages"), **(row.get("extra_info") or {}), **row}
    parameters = inspect.signature(environment.reset).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        columns = {name: value for name, value in columns.items() if name in parameters}
    return _opening(environment.reset(**columns), row)


async def _begin_later(environment: Any, row: Mapping[str, Any]) -> Any:
    return _opening(await _begin(environment, row), row)


def _opening(value: Any, row: Mapping[str, Any]) -> Any:
    """What reset() returned: a text; the row's messages with it, if it is parts with images; None or a coroutine."""
    if value is None or inspect.iscoroutine(value):
        return value
    text, images = text_and_images(value)
    if not images:
        return text
    *before, last = row["messages"]
    return [*before, {**last, "content": [{"type": "text", "text": last["content"]}, *value]}]


def find_env(name: str, kwargs: Mapping[str, Any]) -> Callable[[], Env]:
    """The constructor of an environment. UserError: there is none of that name, or it does not take the arguments."""
    cls = load_object(name, _KEY)
    if not isinstance(cls, type):
        raise UserError(f"{_KEY}={name}: is no environment: derive it from valor.agents.Env")

    def make() -> Env:
        try:
            return cls(**kwargs) if issubclass(cls, Env) else Methods(cls, kwargs)
        except TypeError as error:
            raise UserError(f"{_KEY}={name}: cannot be made with these environment_kwargs ({error})") from None

    return make
