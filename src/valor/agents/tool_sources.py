"""Tools from plain Python functions."""

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from valor.agents.formats import Schema
from valor.agents.tools import Toolbox, ToolSource, name_of
from valor.errors import UserError

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
            if name in toolbox.sub_agents:
                return await by_name[name].function.plays(toolbox, **arguments)  # type: ignore[attr-defined]
            return by_name[name].convert(await toolbox.run(by_name[name].function, arguments, name=name))

        toolbox.calls |= {name: partial(call, name) for name in names}
        toolbox.sub_agents |= {name for name in names if hasattr(by_name[name].function, "plays")}
        yield

    readers = frozenset(name for name, tool in by_name.items() if getattr(tool.function, "takes_kwargs", False))
    return ToolSource([tool.schema for tool in tools], episode, takes_kwargs=readers)


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
