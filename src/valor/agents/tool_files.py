"""Tools by the paths in a configuration: a tools file in verl's form, functions of a file, a class of environments."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError

from valor.agents.builtin_tools import BUILTIN_TOOLS
from valor.agents.tool_sources import FunctionTool, function_source, schema_of
from valor.agents.tools import ToolSource, name_of
from valor.agents.verl_tools import OpenAIFunctionToolSchema, base_tool_source, load_function_tools
from valor.config import load_yaml
from valor.errors import UserError, did_you_mean
from valor.user_files import load_object

_KEY = "rollout.multi_turn.tool_config_path"
_READ_AS = {"verl.tools.search_tool.SearchTool": "search"}


class _Entry(BaseModel, extra="forbid"):
    class_name: str
    config: dict[str, Any] = Field(default_factory=dict)
    tool_schema: OpenAIFunctionToolSchema | None = None


class _ToolsFile(BaseModel):
    tools: list[_Entry] = Field(min_length=1)


def load_sources(tool_config_path: str | None = None, function_tool_path: str | None = None) -> list[ToolSource]:
    """The tools that a configuration names. Raises UserError for files, entries and classes that cannot be used."""
    entries = [] if tool_config_path is None else _load_tools_file(tool_config_path)
    functions = [] if function_tool_path is None else load_function_tools(function_tool_path)
    tools = _with_server_names(entries, functions)
    described = [tool for tool in tools if isinstance(tool, FunctionTool)]
    others = base_tool_source([tool for tool in tools if tool not in described])
    return [function_source(described), others, function_source(functions)]


def _with_server_names(entries: Sequence[Sequence[Any]], functions: Sequence[FunctionTool]) -> list[Any]:
    """The tools of all entries. One of an MCP server whose name is another's too is called SERVER_TOOL, by what the
    server calls itself, with a number from the second server of that name on."""
    uses, servers, tools = Counter(map(_name_of, chain(*entries, functions))), Counter[str](), list[Any]()
    for entry in entries:
        server = re.sub(r"[^\w-]+", "_", getattr(next(iter(entry), None), "server", ""), flags=re.ASCII)
        servers[server] += 1
        number = servers[server] if servers[server] > 1 else ""
        for tool in entry:
            if server and uses[name := _name_of(tool)] > 1:
                function = {**tool.schema["function"], "name": f"{server}{number}_{name}"}
                tool = replace(tool, schema={**tool.schema, "function": function})
            tools.append(tool)
    return tools


def _name_of(tool: Any) -> str:
    return name_of(tool.schema) if isinstance(tool, FunctionTool) else tool.name


def _load_tools_file(path: str) -> list[list[Any]]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        if "${" in text:
            raise UserError(f"{path}: ${{...}} is not filled in here; write the value")
        entries = _ToolsFile.model_validate(load_yaml(text)).tools
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; check {_KEY}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; check {_KEY}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is not yaml: {' '.join(str(error).split())}") from None
    tools: list[list[Any]] = []
    for number, entry in enumerate(entries):
        try:
            tools.append(_make_tools(entry))
        except UserError as error:
            raise UserError(f"{path}: tools[{number}]: {error}") from None
        except Exception as error:
            reason = f"{entry.class_name} cannot be made ({type(error).__name__}: {error})"
            raise UserError(f"{path}: tools[{number}]: {reason}") from error
    return tools


def _make_tools(entry: _Entry) -> list[Any]:
    """FunctionTools for a built-in tool or an MCP server, else an instance of the entry's class."""
    name, config, schema = _READ_AS.get(entry.class_name, entry.class_name), dict(entry.config), entry.tool_schema
    if config.get("type", "native") != "native":
        raise UserError(f"config.type={config['type']} is not supported, only native")
    if name in BUILTIN_TOOLS:
        config.pop("type", None)
        if name == "mcp" and schema is not None:
            raise UserError("an MCP server brings its own schemas: drop tool_schema")
        made = BUILTIN_TOOLS[name](**config)
        described = schema.model_dump(exclude_unset=True) if schema else None
        return made if name == "mcp" else [FunctionTool(made, described or schema_of(made))]
    if "." not in name:
        known = f"(class_name is {', '.join(BUILTIN_TOOLS)}, package.module.Class or file.py:Class)"
        raise UserError(f"there is no built-in tool '{name}'{did_you_mean(name, BUILTIN_TOOLS)} {known}")
    tool = load_object(name, "class_name")(config=config, tool_schema=schema)
    if not callable(getattr(tool, "execute", None)):
        raise UserError(f"{name} is no tool: derive it from valor.agents.BaseTool")
    return [tool]
