"""The tools of an episode: every call ends in one text, whatever the policy wrote or the tool did."""

import asyncio
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
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
"""`ToolRunner.run` with its time limit: `await run(function, arguments, name=..., lock=...)`."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the policy reads after a call. `reward` is of this call; `seconds` are filled in by the toolbox.

    A tool may return one; `error` is "failed" if the tool could not do its work.
    """

    text: str
    reward: float = 0.0
    error: ToolError | None = None
    seconds: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)


class EpisodeTools:
    """Tools of one origin in one episode. All methods may raise ToolFailed."""

    async def open(self, row: Mapping[str, Any], names: Sequence[str]) -> str | None:
        """Begin the episode of a row, of which only the tools `names` are used. Returns a text for the policy."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """A ToolResult, a text, or anything else to be shown as JSON."""
        raise NotImplementedError

    async def reward(self) -> float | None:
        """Of the episode; None when these tools never give one."""

    async def close(self) -> None:
        """Release what the episode holds."""


class ToolSource(NamedTuple):
    """Tools of one origin, loaded once a process. `judges`: they give the outcome of an episode."""

    schemas: list[Schema]
    of_episode: Callable[[Run], EpisodeTools]
    judges: bool = False


class Toolset:
    """All tools of a process. UserError: two have one name, or a schema is not valid.

    `limits`: seconds of a call, characters of its text (a longer one loses its left side, right side or middle), calls
    of a turn.
    """

    def __init__(
        self, sources: Sequence[ToolSource], limits: MultiTurnConfig | None = None, runner: ToolRunner | None = None
    ) -> None:
        self.sources, self.limits, self.runner = sources, limits or MultiTurnConfig(), runner or ToolRunner()
        self.schemas = [schema for source in sources for schema in source.schemas]
        counts = Counter(map(name_of, self.schemas))
        if several := [name for name, count in counts.items() if count > 1]:
            raise UserError(f"there are several tools of the name {', '.join(several)}: rename all but one")
        self.validators = {name_of(schema): _validator(schema) for schema in self.schemas}

    def toolbox(self) -> "Toolbox":
        return Toolbox(self)


class Toolbox:
    """The tools of one episode. Whoever opens it closes it, also when opening raised.

    `schemas` are OpenAI's, for the chat template; after `open`, those of the tools that the row selects.
    """

    def __init__(self, toolset: Toolset) -> None:
        self.schemas = list(toolset.schemas)
        self._limits, self._validators = toolset.limits, toolset.validators
        run = partial(toolset.runner.run, seconds=toolset.limits.tool_timeout)
        self._parts = [(source.of_episode(run), [*map(name_of, source.schemas)]) for source in toolset.sources]
        self._owners = {name: part for part, names in self._parts for name in names}

    async def open(self, row: Mapping[str, Any]) -> str | None:
        """Begin the episode of a row; returns what its environments say at the start.

        UserError: the row names a tool that there is not. EpisodeFailed: one cannot be opened.
        """
        selection = (row.get("extra_info") or {}).get("tool_selection")
        selected = list(self._owners) if selection is None or len(selection) == 0 else list(selection)
        for key, names in (("tool_selection", selected), ("tools_kwargs", tool_kwargs(row))):
            if unknown := [name for name in names if name not in self._owners]:
                hint = did_you_mean(unknown[0], self._owners)
                raise UserError(f"extra_info.{key}: '{unknown[0]}' is not one of the tools{hint}")
        self._owners = {name: part for name, part in self._owners.items() if name in selected}
        self.schemas = [schema for schema in self.schemas if name_of(schema) in self._owners]
        texts = []
        for part, names in self._parts:
            if used := [name for name in names if name in self._owners]:
                texts.append(await part.open(row, used))
        return valid_text("\n".join(text for text in texts if text)) or None

    async def call_all(self, calls: Sequence[Call]) -> list[ToolResult]:
        """The results of one turn's calls, which run at the same time; if some were too many, one more says so."""
        most = self._limits.max_parallel_calls
        results = await asyncio.gather(*map(self.call, calls[:most]))
        if len(calls) > most:
            results.append(_error("excess", f"only the first {most} of these calls were done"))
        return results

    async def call(self, call: Call) -> ToolResult:
        """The result of one call. Raises nothing but TrainingStopped and UserError."""
        began = time.monotonic()
        result = await self._result(call)
        return replace(result, text=self._shortened(result.text), seconds=time.monotonic() - began)

    async def rewards(self) -> float | None:
        """The sum of the tools' rewards for the episode; None: none of them ever gives one. Raises EpisodeFailed."""
        given = [await part.reward() for part in dict.fromkeys(self._owners.values())]
        rewards = [reward for reward in given if reward is not None]
        if not all(map(math.isfinite, rewards)):
            raise EpisodeFailed(f"the tools gave a reward that is no finite number: {rewards}")
        return sum(rewards) if rewards else None

    async def close(self) -> None:
        """Release everything; failures are logged."""
        for part, _ in self._parts:
            try:
                await part.close()
            except ToolFailed as failure:
                _log.warning("%s", failure)

    async def _result(self, call: Call) -> ToolResult:
        if isinstance(call, BadCall):
            return _error("malformed", f"malformed tool call, {call.reason}")
        owner = self._owners.get(call.name)
        if owner is None:
            known = f"the tools are {', '.join(self._owners)}" if self._owners else "there are no tools"
            name = call.name[:60]
            return _error("unknown", f"unknown tool {name!r}{did_you_mean(name, self._owners)} ({known})")
        complaint = _complaint(self._validators[call.name], call.arguments)
        if complaint is not None:
            return _error("arguments", f"wrong arguments for {call.name}, {complaint}")
        try:
            value = await owner.call(call.name, call.arguments)
            result = value if isinstance(value, ToolResult) else ToolResult(as_text(value))
            if not math.isfinite(result.reward):
                raise ValueError(f"its reward is {result.reward}")
            return replace(result, text=as_text(result.text))
        except ToolFailed as failure:
            return _error(failure.kind, str(failure))
        except (TrainingStopped, UserError):
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
    return {name: kwargs for name, kwargs in by_name.items() if kwargs is not None}


def as_text(value: Any) -> str:
    """A text as it is, anything else as JSON, or by `str` where JSON has no form for it."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _error(kind: ToolError, text: str) -> ToolResult:
    return ToolResult(f"Error: {text}{'' if text.endswith('?') else '.'}", error=kind)


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
