"""The tools of an episode behind one box: every call ends in one text, whatever the policy wrote or the tool did."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import best_match

from valor.agents.episode import EpisodeFailed
from valor.agents.formats import BadCall, Call, Schema, parameters_of, valid_text
from valor.agents.tool_runner import ToolFailed, ToolRunner, exception_text
from valor.config.rollout import MultiTurnConfig
from valor.errors import TrainingStopped, UserError, did_you_mean

_log = logging.getLogger(__name__)
_MAX_COMPLAINT = 200  # characters

ToolError = Literal["malformed", "unknown", "arguments", "exception", "timeout", "failed", "excess"]
Run = Callable[..., Coroutine[Any, Any, Any]]
"""`ToolRunner.run` with the time limit: `await run(function, arguments, lock=...)`."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the policy is told after a call. `reward` is of this call; `seconds` are filled in by the toolbox.

    A tool may return one. `error` "failed" is for a tool that says itself that it could not do its work.
    """

    text: str
    reward: float = 0.0
    error: ToolError | None = None
    seconds: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)


class EpisodeTools:
    """Tools of one origin in one episode. `takes_kwargs`: they read `tools_kwargs` of the row.

    ToolFailed passes through all methods; the toolbox makes texts of it.
    """

    takes_kwargs = False

    async def open(self, row: Mapping[str, Any], names: Sequence[str]) -> str | None:
        """Begin the episode of a row, of which only the tools `names` are used. A text is for the policy to read."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """A ToolResult, or anything that is a text or becomes one as JSON."""
        raise NotImplementedError

    async def reward(self) -> float | None:
        """Of the whole episode; None when these tools never give one."""

    async def close(self) -> None:
        """Let go of what the episode has."""


class ToolSource(NamedTuple):
    """Tools of one origin, loaded once a process. `judges`: they give the outcome of an episode."""

    schemas: list[Schema]
    of_episode: Callable[[Run], EpisodeTools]
    judges: bool = False


class Toolset:
    """All tools of a process. Raises UserError for two of one name, and for a schema that is not valid.

    `limits`: seconds of one call, characters of its text, calls of one turn. A longer text loses its left side, its
    right side or its middle, and says so.
    """

    def __init__(
        self, sources: Sequence[ToolSource], limits: MultiTurnConfig | None = None, runner: ToolRunner | None = None
    ) -> None:
        self.sources, self.limits, self.runner = sources, limits or MultiTurnConfig(), runner or ToolRunner()
        self.schemas = [schema for source in sources for schema in source.schemas]
        names = Counter(name_of(schema) for schema in self.schemas)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise UserError(f"there are several tools of the name {', '.join(twice)}: rename all but one")
        self.checks = {name_of(schema): ArgumentCheck(schema) for schema in self.schemas}

    def toolbox(self) -> Toolbox:
        return Toolbox(self)


class Toolbox:
    """The tools of one episode. Whoever opens it closes it, also when opening raised.

    `schemas` are OpenAI's, for the chat template; after `open`, those of the tools that the row selects.
    """

    def __init__(self, toolset: Toolset) -> None:
        self.schemas = list(toolset.schemas)
        self._limits, self._checks = toolset.limits, toolset.checks
        run = partial(toolset.runner.run, seconds=toolset.limits.tool_timeout)
        self._parts = [(source.of_episode(run), [*map(name_of, source.schemas)]) for source in toolset.sources]
        self._owners = {name: part for part, names in self._parts for name in names}

    async def open(self, row: Mapping[str, Any]) -> str | None:
        """Begin the episode of a row; what its environments say at the start.

        Raises UserError when the row names tools that there are not, and EpisodeFailed when one cannot be opened.
        """
        extra_info = row.get("extra_info") or {}
        selection = extra_info.get("tool_selection")
        selected = list(self._owners) if selection is None or len(selection) == 0 else list(selection)
        self._check_names("tool_selection", selected)
        self._check_names("tools_kwargs", tool_kwargs(row))
        self._owners = {name: part for name, part in self._owners.items() if name in selected}
        self.schemas = [schema for schema in self.schemas if name_of(schema) in self._owners]
        texts = []
        for part, names in self._parts:
            used = [name for name in names if name in self._owners]
            if used:
                texts.append(await self._whole_episode(part.open(row, used), f"opening {', '.join(used)}"))
        return valid_text("\n".join(text for text in texts if text)) or None

    async def call_all(self, calls: Sequence[Call]) -> list[ToolResult]:
        """The results of one turn's calls, which run at the same time.

        Those beyond `max_parallel_calls` are not done, and one more result says so.
        """
        most = self._limits.max_parallel_calls
        results = await asyncio.gather(*map(self.call, calls[:most]))
        if len(calls) > most:
            results.append(_error("excess", f"only the first {most} of these calls were done"))
        return results

    async def call(self, call: Call) -> ToolResult:
        """One call's result. Raises nothing but TrainingStopped, when too many calls hang."""
        began = time.monotonic()
        result = await self._result(call)
        return replace(result, text=self._shortened(result.text), seconds=time.monotonic() - began)

    async def rewards(self) -> float | None:
        """The sum of what the tools give for the whole episode; None when none of them ever does.

        Raises EpisodeFailed when one cannot say.
        """
        given = [
            await self._whole_episode(part.reward(), "the reward") for part in dict.fromkeys(self._owners.values())
        ]
        rewards = [reward for reward in given if reward is not None]
        if not all(map(math.isfinite, rewards)):
            raise EpisodeFailed(f"the tools gave a reward that is no finite number: {rewards}")
        return sum(rewards) if rewards else None

    async def close(self) -> None:
        """Let go of everything; what fails is logged."""
        for part, _ in self._parts:
            try:
                await part.close()
            except ToolFailed as failure:
                _log.warning("closing %s: it %s", type(part).__name__, failure)

    def _check_names(self, key: str, names: Iterable[str]) -> None:
        for name in names:
            owner = self._owners.get(name)
            if owner is None or (key == "tools_kwargs" and not owner.takes_kwargs):
                what = "is a function or a method, which takes none" if owner else "is not one of the tools"
                raise UserError(f"extra_info.{key}: '{name}' {what}{did_you_mean(name, {*self._owners} - {name})}")

    async def _whole_episode(self, work: Coroutine[Any, Any, Any], what: str) -> Any:
        try:
            return await work
        except ToolFailed as failure:
            raise EpisodeFailed(f"{what}: it {failure}") from failure

    async def _result(self, call: Call) -> ToolResult:
        if isinstance(call, BadCall):
            return _error("malformed", f"malformed tool call, {call.reason}")
        owner = self._owners.get(call.name)
        if owner is None:
            known = f"the tools are {', '.join(self._owners)}" if self._owners else "there are no tools"
            name = call.name[:60]
            return _error("unknown", f"unknown tool {name!r}{did_you_mean(name, self._owners)} ({known})")
        wrong = self._checks[call.name].complaint(call.arguments)
        if wrong is not None:
            return _error("arguments", f"wrong arguments for {call.name}, {wrong}")
        try:
            return as_result(await owner.call(call.name, call.arguments))
        except ToolFailed as failure:
            return _error(failure.kind, f"{call.name} {failure}")
        except TrainingStopped:
            raise
        except Exception as error:
            return _error("failed", f"what {call.name} returned cannot be used, {exception_text(error)}")

    def _shortened(self, text: str) -> str:
        """The text in valid Unicode and at most as long as it may be."""
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
    """`extra_info.tools_kwargs` of a row, for the tools that have any."""
    given = (row.get("extra_info") or {}).get("tools_kwargs") or {}
    return {name: kwargs for name, kwargs in given.items() if kwargs is not None}


def as_result(value: Any) -> ToolResult:
    """What a tool returned, as the result of a call. Raises ValueError for a reward that is no finite number."""
    result = value if isinstance(value, ToolResult) else ToolResult(as_text(value))
    if not math.isfinite(result.reward):
        raise ValueError(f"its reward is {result.reward}")
    return replace(result, text=as_text(result.text))


def as_text(value: Any) -> str:
    """A text as it is, anything else as JSON, or as Python writes it when it is none."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _error(kind: ToolError, text: str) -> ToolResult:
    return ToolResult(f"Error: {text}{'' if text.endswith('?') else '.'}", error=kind)


class ArgumentCheck:
    """The parameters of one tool. Raises UserError when they are no JSON schema.

    Arguments without a name in the schema are wrong, unless it has `additionalProperties`.
    """

    def __init__(self, schema: Schema) -> None:
        parameters = parameters_of(schema)
        try:
            Draft202012Validator.check_schema(parameters)
        except SchemaError as error:
            raise UserError(
                f"the parameters of tool {schema['function']['name']} are no JSON schema: {error.message} "
                f"(at {error.json_path})"
            ) from None
        self._validator = Draft202012Validator(parameters)
        self._names = parameters.get("properties", {}) if "additionalProperties" not in parameters else None

    def complaint(self, arguments: Mapping[str, Any]) -> str | None:
        """What is wrong with the arguments, None when nothing is."""
        if self._names is not None:
            for name in arguments:
                if name not in self._names:
                    return f"there is no argument {name[:60]!r}{did_you_mean(name[:60], self._names)}"
        try:
            error = best_match(self._validator.iter_errors(arguments))
        except Exception as error:  # too deeply nested, or a reference in the schema that leads nowhere
            return f"they cannot be checked ({type(error).__name__})"
        if error is None:
            return None
        place = ".".join(map(str, error.absolute_path))
        return f"{place}: {error.message}"[:_MAX_COMPLAINT] if place else error.message[:_MAX_COMPLAINT]
