"""The tools of an episode: every call ends in one text, whatever the policy wrote or the tool did."""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import best_match
from pydantic_core import to_jsonable_python

from valor.agents.episode import EpisodeFailed
from valor.agents.formats import BadCall, Call, Schema, parameters_of, valid_text
from valor.agents.tool_runner import ToolFailed, exception_text, run_tool
from valor.config.rollout import MultiTurnConfig
from valor.data.messages import kind_of
from valor.errors import UserError, did_you_mean
from valor.tracking.generations import plain

_MAX_COMPLAINT = 200  # characters
_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")

ToolError = Literal["malformed", "unknown", "arguments", "exception", "timeout", "failed", "excess"]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the policy reads after a call. `reward` is of this call; `seconds` are filled in by the toolbox. `images`
    stand before the text, in a run that reads them: as a row of the data has them, of the toolbox as files.

    A tool may return one; `error` is "failed" if the tool could not do its work.
    """

    text: str
    reward: float = 0.0
    error: ToolError | None = None
    seconds: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    images: Sequence[Any] = ()


class ToolSource(NamedTuple):
    """Tools of one origin, loaded once a process. `judges`: they give the outcome of an episode. `always`: rows
    that select none of them have them too. `takes_kwargs`: those for which a row may have `tools_kwargs`.

    `episode(toolbox, row, names)` puts the tools `names` into the toolbox of a row's episode, and releases them at its
    end.
    """

    schemas: list[Schema]
    episode: Callable[["Toolbox", Mapping[str, Any], Sequence[str]], AbstractAsyncContextManager[None]]
    judges: bool = False
    always: bool = False
    takes_kwargs: frozenset[str] = frozenset()


class Toolset:
    """All tools of a process. UserError: two have one name, or a schema is not valid.

    `limits`: seconds of a call, characters of its text (a longer one loses its left side, right side or middle), calls
    of a turn.
    """

    def __init__(self, sources: Sequence[ToolSource], limits: MultiTurnConfig | None = None) -> None:
        self.sources, self.limits = sources, limits or MultiTurnConfig()
        self.schemas = [schema for source in sources for schema in source.schemas]
        counts = Counter(map(name_of, self.schemas))
        if several := [name for name, count in counts.items() if count > 1]:
            raise UserError(f"there are several tools of the name {', '.join(several)}: rename all but one")
        self.validators = {name_of(schema): _validator(schema) for schema in self.schemas}


class Toolbox:
    """The tools of one episode. Whoever opens it closes it, also when opening raised.

    `schemas` are OpenAI's, for the chat template; after `open`, those of the tools that the row selects. Sources fill
    `calls` (by name, from arguments to a ToolResult, a text or what JSON shows; may raise ToolFailed), `openings`
    (texts for the policy), `judges` (rewards of the episode) and `unscored` (rewards that count for nothing). `run` is
    `run_tool` with its time limit. An environment sets `messages` (None: the row's), `hidden` (what only a critic
    reads), `step` and `heard` (its methods; None: it has none of its own). A loop sets `chat`, `play` (the episode) and
    `converse(talk, toolbox, most_turns)`, by which the tools named in `sub_agents` play conversations of their own.
    """

    def __init__(self, toolset: Toolset) -> None:
        self.schemas, self._limits, self._validators = list(toolset.schemas), toolset.limits, toolset.validators
        self._sources = toolset.sources
        self.run = partial(run_tool, seconds=toolset.limits.tool_timeout)
        self.calls: dict[str, Callable[[Mapping[str, Any]], Awaitable[Any]]] = {}
        self.judges: list[Callable[[], Awaitable[float | None]]] = []
        self.unscored: list[Callable[[], Awaitable[float | None]]] = []
        self.openings: list[str] = []
        self.messages: list[Mapping[str, Any]] | None = None
        self.hidden: Mapping[str, Any] = {}
        self.step: Callable[[str], Awaitable[Any]] | None = None
        self.heard: Callable[[str], Awaitable[Any]] | None = None
        self.chat: Any = None
        self.play: Any = None
        self.converse: Callable[..., Awaitable[Any]] | None = None
        self.sub_agents: set[str] = set()
        self._open = AsyncExitStack()

    async def open(self, row: Mapping[str, Any]) -> str | None:
        """Begin the episode of a row; returns what its environments say at the start.

        UserError: the row names a tool that there is not. EpisodeFailed: one cannot be opened.
        """
        known = [name_of(schema) for schema in self.schemas]
        selection = (row.get("extra_info") or {}).get("tool_selection")
        if isinstance(selection, str):
            raise UserError(f"extra_info.tool_selection must be a list of tools, got {selection!r}")
        _check_kwargs(tool_kwargs(row))
        selected = known if selection is None or len(selection) == 0 else list(selection)
        for key, names in (("tool_selection", selected), ("tools_kwargs", tool_kwargs(row))):
            if unknown := [name for name in names if name not in known]:
                hint = did_you_mean(unknown[0], known)
                raise UserError(f"extra_info.{key}: '{unknown[0]}' is not one of the tools{hint}")
        readers = {name for source in self._sources for name in source.takes_kwargs}
        if unread := [name for name in tool_kwargs(row) if name not in readers]:
            raise UserError(f"extra_info.tools_kwargs: '{unread[0]}' is a function or a method, which takes none")
        self.schemas = [schema for schema in self.schemas if name_of(schema) in selected]
        for source in self._sources:
            names = [name for name in map(name_of, source.schemas) if name in selected]
            if names or source.always:
                await self._open.enter_async_context(source.episode(self, row, names))
        return valid_text("\n".join(filter(None, self.openings))) or None

    async def call_all(self, calls: Sequence[Call]) -> list[ToolResult]:
        """The results of one turn's calls, which run at the same time; if some were too many, one more says so."""
        most = self._limits.max_parallel_calls
        results = await asyncio.gather(*map(self.call, calls[:most]))
        if len(calls) > most:
            results.append(_error("excess", f"only the first {most} of these calls were done"))
        return results

    async def call(self, call: Call) -> ToolResult:
        """The result of one call. Raises nothing but UserError."""
        began = time.monotonic()
        result = await self._result(call)
        return replace(result, text=self._shortened(result.text), seconds=time.monotonic() - began)

    async def rewards(self, *, scored: bool = True) -> float | None:
        """The sum of the rewards for the episode; None: nobody gives one. Raises EpisodeFailed."""
        judges = self.judges if scored else self.unscored
        rewards = [reward for judge in judges if (reward := await judge()) is not None]
        if not all(map(math.isfinite, rewards)):
            raise EpisodeFailed(f"the tools gave a reward that is no finite number: {rewards}")
        return sum(rewards) if rewards else None

    async def close(self) -> None:
        """Release everything."""
        await self._open.aclose()

    async def _result(self, call: Call) -> ToolResult:
        if isinstance(call, BadCall):
            return _error("malformed", f"malformed tool call, {call.reason}")
        if call.name not in self.calls:
            known = f"the tools are {', '.join(self.calls)}" if self.calls else "there are no tools"
            name = call.name[:60]
            return _error("unknown", f"unknown tool {name!r}{did_you_mean(name, self.calls)} ({known})")
        complaint = _complaint(self._validators[call.name], call.arguments)
        if complaint is not None:
            return _error("arguments", f"wrong arguments for {call.name}, {complaint}")
        try:
            value = await self.calls[call.name](call.arguments)
            result = value if isinstance(value, ToolResult) else ToolResult(value)
            if not math.isfinite(result.reward):
                raise ValueError(f"its reward is {result.reward}")
            text, images = text_and_images(result.text)
            shown = self.chat.files(sources, call.name) if (sources := [*result.images, *images]) else ()
            return replace(result, text=text, images=shown, reward=float(result.reward))
        except ToolFailed as failure:
            return _error(failure.kind, str(failure))
        except UserError:
            raise
        except Exception as error:
            return _error("failed", f"what {call.name} returned cannot be used, {exception_text(error)}")

    def _shortened(self, text: str) -> str:
        """The text in valid Unicode, of at most `max_tool_response_length` characters and a mark."""
        most, side = self._limits.max_tool_response_length, self._limits.tool_response_truncate_side
        if most is not None and len(text) > most:
            left = {"left": 0, "right": most, "middle": most // 2}[side]
            right = {"left": most, "right": 0, "middle": most // 2}[side]
            marks = ("..." if left else "", "..." if right else "")
            text = f"{text[:left]}{marks[0]}(truncated){marks[1]}{text[len(text) - right :]}"
        return valid_text(text).replace("\0", "\ufffd")


def name_of(schema: Schema) -> str:
    return schema["function"]["name"]


def tool_kwargs(row: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """`extra_info.tools_kwargs` of a row, without the tools that have none."""
    by_name = (row.get("extra_info") or {}).get("tools_kwargs") or {}
    if not isinstance(by_name, Mapping):
        raise UserError(f"extra_info.tools_kwargs must be a dictionary by tools, got {kind_of(by_name)}")
    return {name: kwargs for name, kwargs in by_name.items() if kwargs is not None}


def _check_kwargs(by_name: Mapping[str, Any]) -> None:
    for name, kwargs in by_name.items():
        by_key = kwargs if isinstance(kwargs, Mapping) else {str(kwargs): {}}
        for key, value in by_key.items():
            if value is not None and (key not in _KWARGS or not isinstance(value, Mapping)):
                keys = f"its keys are {', '.join(_KWARGS)}, each with a dictionary"
                raise UserError(f"extra_info.tools_kwargs.{name}: '{key}'{did_you_mean(key, _KWARGS)} ({keys})")


def as_text(value: Any) -> str:
    """A text as it is, anything else as JSON: numbers of NumPy and torch, fields of objects, by `str` what has none."""
    try:
        shown = to_jsonable_python(value, fallback=plain)
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
    except Exception:  # also of the serializers of objects
        return str(value)


def text_and_images(value: Any) -> tuple[str, list[Any]]:
    """`as_text` and no images; of a list of a message's parts, as TRL's tools return them, what these hold."""
    parts = value if isinstance(value, list) and all(isinstance(part, Mapping) for part in value) else []
    if not parts or any(part.keys() not in ({"type", "text"}, {"type", "image"}) for part in parts):
        return as_text(value), []
    return "".join(part.get("text", "") for part in parts), [part["image"] for part in parts if "image" in part]


def _error(kind: ToolError, text: str) -> ToolResult:
    return ToolResult(f"Error: {text}{'' if text.endswith(('?', '.')) else '.'}", error=kind)


def _validator(schema: Schema) -> Draft202012Validator:
    """Of a tool's arguments. Those that the schema does not name are wrong, unless it has `additionalProperties`."""
    parameters = parameters_of(schema)
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        where = f"{error.message} (at {error.json_path})"
        raise UserError(f"the parameters of tool {name_of(schema)} are no JSON schema: {where}") from None
    closed = {} if "additionalProperties" in parameters else {"unevaluatedProperties": False}
    return Draft202012Validator({**parameters, **closed})


def _complaint(validator: Draft202012Validator, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with a call's arguments; None: nothing."""
    try:
        error = best_match(validator.iter_errors(arguments))
    except Exception as failure:  # nested too deeply, or a reference in the schema that leads nowhere
        return f"they cannot be checked ({type(failure).__name__})"
    if error is None:
        return None
    path = ".".join(map(str, error.absolute_path))
    return f"{path}: {error.message}"[:_MAX_COMPLAINT] if path else error.message[:_MAX_COMPLAINT]
