"""Tools from plain Python: functions, and the public methods of an environment of which each episode has an object."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from valor.agents.formats import Schema
from valor.agents.tool_runner import release
from valor.agents.tools import Toolbox, ToolSource, as_text, name_of
from valor.errors import UserError

_NO_TOOLS = ("reset", "get_reward", "close")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function or coroutine function, and its schema. `convert` is applied to the result."""

    function: Callable[..., Any]
    schema: Schema
    convert: Callable[[Any], Any] = lambda result: result


def function_source(functions: Sequence[FunctionTool | Callable[..., Any]]) -> ToolSource:
    """Functions as tools, without a state of the episode."""
    tools = [tool if isinstance(tool, FunctionTool) else FunctionTool(tool, schema_of(tool)) for tool in functions]
    by_name = {name_of(tool.schema): tool for tool in tools}

    @asynccontextmanager
    async def episode(toolbox: Toolbox, row: Mapping[str, Any], names: Sequence[str]) -> AsyncIterator[None]:
        async def call(name: str, arguments: Mapping[str, Any]) -> Any:
            return by_name[name].convert(await toolbox.run(by_name[name].function, arguments, name=name))

        toolbox.calls |= {name: partial(call, name) for name in names}
        yield

    readers = frozenset(name for name, tool in by_name.items() if getattr(tool.function, "takes_kwargs", False))
    return ToolSource([tool.schema for tool in tools], episode, takes_kwargs=readers)


def environment_source(environment: type, kwargs: Mapping[str, Any] | None = None) -> ToolSource:
    """A class of environments, in the shape of TRL's `environment_factory`.

    `__init__` takes `kwargs`; `reset(**row)` begins the episode and may return a text for the policy to read;
    `get_reward() -> float` and `close()` are optional; every other public method is a tool. Methods may be coroutine
    functions; those of one instance never overlap. Raises UserError for a class of another shape.
    """
    name = environment.__name__
    if not callable(getattr(environment, "reset", None)):
        raise UserError(f"environment {name} has no method reset(): it begins an episode, and takes a row's columns")
    try:
        inspect.signature(environment).bind(**(kwargs or {}))
    except TypeError as error:
        raise UserError(f"environment {name} cannot be made with these environment_kwargs: {error}") from None
    methods = inspect.getmembers(environment, inspect.isroutine)
    schemas = [schema_of(method) for key, method in methods if not key.startswith("_") and key not in _NO_TOOLS]
    if not schemas:
        raise UserError(f"environment {name} has no public method beside reset(): it has no tools")
    return ToolSource(
        schemas, partial(_environment_episode, environment, kwargs or {}), hasattr(environment, "get_reward")
    )


@asynccontextmanager
async def _environment_episode(
    environment: type, kwargs: Mapping[str, Any], toolbox: Toolbox, row: Mapping[str, Any], names: Sequence[str]
) -> AsyncIterator[None]:
    """`reset` gets the row's columns and its `extra_info`, or those of them that it names."""
    instance = await toolbox.run(environment, kwargs, name=environment.__name__)
    lock = asyncio.Lock()

    async def call(name: str, arguments: Mapping[str, Any]) -> Any:
        return await toolbox.run(getattr(instance, name), arguments, name=name, lock=lock)

    async def reward() -> float:
        return float(await call("get_reward", {}))

    try:
        columns = {**(row.get("extra_info") or {}), **row}
        parameters = inspect.signature(instance.reset).parameters
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            columns = {name: value for name, value in columns.items() if name in parameters}
        text = await call("reset", columns)
        toolbox.openings.append("" if text is None else as_text(text))
        toolbox.calls |= {name: partial(call, name) for name in names}
        toolbox.judges += [reward] if hasattr(environment, "get_reward") else []
        yield
    finally:
        if hasattr(environment, "close"):
            await release(call("close", {}))


def schema_of(function: Callable[..., Any], name: str | None = None) -> Schema:
    """OpenAI's schema of a function by its type hints and Google docstring, under its own name or another.

    Raises UserError when they do not say enough.
    """
    name = name or getattr(function, "__name__", type(function).__name__)
    try:
        if any(parameter.kind in _VARIADIC for parameter in inspect.signature(function).parameters.values()):
            raise TypeError("*args and **kwargs cannot be described, name each argument")
        schema = get_json_schema(function)
    except Exception as error:  # transformers has several kinds, and hints may be names that mean nothing
        raise UserError(f"{name}() cannot be a tool: {' '.join(str(error).split())}") from error
    return {**schema, "function": {**schema["function"], "name": name}}
