"""Tools from plain Python functions."""

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, get_args, get_type_hints

import transformers
from pydantic import TypeAdapter, ValidationError
from transformers.utils.chat_template_utils import DocstringParsingException, get_json_schema

from valor.agents.formats import Schema
from valor.agents.tools import Toolbox, ToolSource, name_of
from valor.errors import UserError

_UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function or coroutine function, and its schema. `convert` is applied to the result. `server`: the name of the
    MCP server that has it."""

    function: Callable[..., Any]
    schema: Schema
    convert: Callable[[Any], Any] = lambda result: result
    server: str = ""


def function_source(functions: Sequence[FunctionTool | Callable[..., Any]]) -> ToolSource:
    """Functions as tools, without a state of the episode."""
    tools = [tool if isinstance(tool, FunctionTool) else FunctionTool(tool, schema_of(tool)) for tool in functions]
    by_name = {name_of(tool.schema): tool for tool in tools}

    @asynccontextmanager
    async def episode(toolbox: Toolbox, row: Mapping[str, Any], names: Sequence[str]) -> AsyncIterator[None]:
        async def call(name: str, arguments: Mapping[str, Any]) -> Any:
            if name in toolbox.sub_agents:
                return await by_name[name].function.plays(toolbox, **arguments)  # type: ignore[attr-defined]
            function = by_name[name].function
            return by_name[name].convert(await toolbox.run(function, as_hinted(function, arguments), name=name))

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
        if any(parameter.kind in _UNNAMED for parameter in inspect.signature(function).parameters.values()):
            raise TypeError("*args, **kwargs and arguments before a / cannot be described, name each argument")
        schema = get_json_schema(function)
        if any(map(_has_enum, get_type_hints(function).values())) and "'enum'" not in str(schema):
            raise TypeError(
                f"transformers {transformers.__version__} knows no Enum: take typing.Literal, or version 5.23"
            )
    except DocstringParsingException as error:
        written = (
            "write a Google docstring: what it does, then 'Args:' and a line 'name: description' for each argument"
        )
        raise UserError(f"{name}() cannot be a tool: {error}; {written}") from error
    except Exception as error:  # transformers has several kinds, and hints may be names that mean nothing
        raise UserError(f"{name}() cannot be a tool: {' '.join(str(error).split())}") from error
    return {**schema, "function": {**schema["function"], "name": name}}


def _has_enum(hint: Any) -> bool:
    return any(map(_has_enum, get_args(hint))) or (isinstance(hint, type) and issubclass(hint, Enum))


def as_hinted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments from JSON in the types of a function's hints: in JSON 3.0 is an integer, an Enum's member a value."""
    types = _types(getattr(function, "__func__", function))
    return {name: _in_type(types[name], value) if name in types else value for name, value in arguments.items()}


@cache
def _types(function: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    with suppress(Exception):  # under a schema of its own, hints may be anything
        return {name: TypeAdapter(hint) for name, hint in get_type_hints(function).items() if name != "return"}
    return {}


def _in_type(hint: TypeAdapter[Any], value: Any) -> Any:
    for strict in (True, False):
        with suppress(ValidationError):
            read = hint.validate_python(value, strict=strict)
            return value if strict else read
    return value
