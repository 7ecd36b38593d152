"""Tools by the paths in a configuration: a tools file in verl's form, functions of a file, a class of environments."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from valor.agents.builtin_tools import BUILTIN_TOOLS
from valor.agents.mcp_tools import mcp_tools
from valor.agents.tool_sources import FunctionTool, environment_source, function_source, schema_of
from valor.agents.tools import ToolSource
from valor.agents.verl_tools import OpenAIFunctionToolSchema, base_tool_source, load_function_tools
from valor.errors import UserError, did_you_mean
from valor.user_files import load_object

_KEY = "rollout.multi_turn.tool_config_path"
_ENTRY_KEYS = ("class_name", "config", "tool_schema")
_SEARCH = "valor.agents.search.tool.SearchTool"
_READ_AS = {"search": _SEARCH, "verl.tools.search_tool.SearchTool": _SEARCH}


def load_sources(
    tool_config_path: str | None = None, function_tool_path: str | None = None, environment: str | None = None
) -> list[ToolSource]:
    """The tools that a configuration names. `environment` is a class, as `package.module.Class` or `file.py:Class`.

    Raises UserError for files and entries that cannot be used.
    """
    sources: list[ToolSource] = []
    if tool_config_path is not None:
        sources += _load_tools_file(tool_config_path)
    if function_tool_path is not None:
        sources.append(function_source(load_function_tools(function_tool_path)))
    if environment is not None:
        sources.append(environment_source(load_object(environment, "rollout.multi_turn.environment")))
    return sources


def _load_tools_file(path: str) -> list[ToolSource]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; check {_KEY}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is not yaml: {' '.join(str(error).split())}") from None
    entries = tree.get("tools") if isinstance(tree, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: must have a list `tools:`; check {_KEY}")
    if "${" in text:
        raise UserError(f"{path}: ${{...}} is not filled in here; write the value")
    made = [tool for i, entry in enumerate(entries) for tool in _make_tools(f"{path}: tools[{i}]", entry)]
    functions = [tool for tool in made if isinstance(tool, FunctionTool)]
    return [function_source(functions), base_tool_source([tool for tool in made if not isinstance(tool, FunctionTool)])]


def _make_tools(place: str, entry: Any) -> list[Any]:
    """FunctionTools, if the entry is of a built-in tool or an MCP server, or an instance of its class."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class_name"), str):
        raise UserError(f"{place}: has no class_name")
    for key in entry:
        if key not in _ENTRY_KEYS:
            raise UserError(f"{place}: unknown key '{key}'{did_you_mean(str(key), _ENTRY_KEYS)}")
    config, given = dict(entry.get("config") or {}), str(entry["class_name"])
    name = _READ_AS.get(given, given)
    if config.get("type", "native") != "native":
        raise UserError(f"{place}: config.type={config['type']} is not supported, only native")
    schema = None
    if entry.get("tool_schema") is not None:
        try:
            schema = OpenAIFunctionToolSchema.model_validate(entry["tool_schema"])
        except ValidationError as error:
            wrong = error.errors()[0]
            raise UserError(f"{place}: tool_schema.{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
    if name in BUILTIN_TOOLS:
        config.pop("type", None)
        function = _construct(place, name, BUILTIN_TOOLS[name], config)
        return [FunctionTool(function, schema.model_dump(exclude_unset=True) if schema else schema_of(function))]
    if name == "mcp":
        if schema is not None:
            raise UserError(f"{place}: an MCP server brings its own schemas: drop tool_schema")
        config.pop("type", None)
        return _construct(place, name, mcp_tools, config)
    if "." not in name:
        raise UserError(
            f"{place}: there is no built-in tool '{name}'{did_you_mean(name, BUILTIN_TOOLS)} (class_name is "
            f"{', '.join(BUILTIN_TOOLS)}, mcp, package.module.Class or file.py:Class)"
        )
    tool = _construct(place, name, load_object(name, place), {"config": config, "tool_schema": schema})
    if not all(callable(getattr(tool, method, None)) for method in ("create", "execute", "calc_reward", "release")):
        raise UserError(f"{place}: {name} is no tool: derive it from valor.agents.BaseTool")
    return [tool]


def _construct(place: str, name: str, make: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return make(**arguments)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{place}: {name} cannot be made ({type(error).__name__}: {error})") from error
