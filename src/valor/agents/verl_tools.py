"""Tools as verl declares them: classes derived from `BaseTool`, and functions under `@function_tool`.

Shapes of volcengine/verl, verl/tools/base_tool.py, function_tool.py and schemas.py.
"""

import asyncio
import inspect
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel, Field
from torch import Tensor

from valor.agents.formats import Schema
from valor.agents.tool_runner import release
from valor.agents.tool_sources import FunctionTool, schema_of
from valor.agents.tools import Toolbox, ToolResult, ToolSource, tool_kwargs
from valor.errors import UserError
from valor.user_files import load_file


class _Parameters(BaseModel, extra="allow"):
    type: str = "object"
    properties: dict[str, Any] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class _Function(BaseModel, extra="allow"):
    name: str
    description: str = ""
    parameters: _Parameters = Field(default_factory=_Parameters)


class OpenAIFunctionToolSchema(BaseModel, extra="allow"):
    """A tool's description for the policy."""

    type: str = "function"
    function: _Function


class ToolResponse(BaseModel, extra="forbid"):
    """What a tool answers. Videos are refused."""

    text: str | None = None
    image: list[Any] | None = None


class BaseTool:
    """One tool for all episodes, each of which has an instance of it, named by an id.

    An instance is created when its episode begins and released when it ends; calls of one instance never overlap.
    `create` and `execute` may also return what they did in older versions of verl: the id alone, and a text.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        schema = tool_schema or self.get_openai_tool_schema()
        if schema is None:
            raise UserError(f"{type(self).__name__} has no schema: give tool_schema, or get_openai_tool_schema()")
        self.tool_schema = schema
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """The schema of a tool that is declared without one."""
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Make an instance and return its id. The row's `create_kwargs` come as keywords and as `create_kwargs`."""
        return instance_id or uuid.uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]] | ToolResult:
        """The answer to a call, its reward, and its metrics."""
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of the episode, computed when it has ended."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Delete an instance."""


def base_tool_source(tools: Sequence[BaseTool]) -> ToolSource:
    """Instances of BaseTool as tools; an episode has those that its row selects."""
    schemas: list[Schema] = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]
    by_name = {tool.name: tool for tool in tools}
    return ToolSource(schemas, partial(_instances_episode, by_name), takes_kwargs=frozenset(by_name))


@asynccontextmanager
async def _instances_episode(
    tools: Mapping[str, BaseTool], toolbox: Toolbox, row: Mapping[str, Any], names: Sequence[str]
) -> AsyncIterator[None]:
    """What `create` answers beside the id is not shown to the policy, as in verl."""
    ids: dict[str, str] = {}
    locks = {name: asyncio.Lock() for name in names}

    def kwargs_of(name: str, method: str) -> dict[str, Any]:
        return dict(tool_kwargs(row).get(name, {}).get(f"{method}_kwargs") or {})

    async def call(name: str, method: str, *arguments: Any) -> Any:
        function = partial(getattr(tools[name], method), ids[name], *arguments)
        label = name if method == "execute" else f"{name}.{method}"
        return await toolbox.run(function, kwargs_of(name, method), name=label, lock=locks[name])

    async def execute(name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return verl_result(await call(name, "execute", dict(arguments)))

    async def close(name: str) -> None:
        await release(call(name, "release"))

    async def reward(name: str) -> float | None:
        """None of what is no number, as verl's SandboxFusionTool answers with a list."""
        value = await call(name, "calc_reward")
        return float(value) if isinstance(value, int | float | np.generic | Tensor) else None

    async with AsyncExitStack() as releases:
        for name in names:
            kwargs, create = kwargs_of(name, "create"), tools[name].create
            parameters = inspect.signature(create).parameters
            if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
                kwargs = {**kwargs, "create_kwargs": kwargs}
            elif "create_kwargs" in parameters:
                kwargs = {"create_kwargs": kwargs}
            created = await toolbox.run(create, {"instance_id": uuid.uuid4().hex, **kwargs}, name=f"{name}.create")
            ids[name] = created[0] if isinstance(created, tuple) else created
            releases.push_async_callback(close, name)
        toolbox.calls |= {name: partial(execute, name) for name in names}
        counting = (name for name in names if type(tools[name]).calc_reward is not BaseTool.calc_reward)
        toolbox.unscored += [partial(reward, name) for name in counting]
        yield


def verl_result(value: Any) -> ToolResult:
    """A tool's return value in any of verl's shapes: the answer, or a tuple of answer, reward and metrics.

    The answer is a ToolResponse, a text, or anything that becomes one as JSON. Raises TypeError for other tuples.
    """
    if isinstance(value, ToolResult):
        return value
    parts = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(f"a tuple of {len(parts)}: return the answer, its reward and its metrics")
    answer, reward, metrics = (*parts, None, None)[:3]
    if getattr(answer, "video", None):  # verl's own ToolResponse has them
        raise TypeError("videos are not supported")
    text, images = getattr(answer, "text", answer), getattr(answer, "image", None) or ()
    return ToolResult("" if text is None else text, float(reward or 0.0), metrics=dict(metrics or {}), images=images)


def function_tool(name: str | Callable[..., Any] | None = None, *, schema: Any = None) -> Any:
    """Mark a function of a file as a tool, as `@function_tool`, or `@function_tool("name")` for another name.

    `schema`, a dictionary or OpenAIFunctionToolSchema, is for a function that hints and docstring do not describe. The
    function may return a text, anything that becomes one as JSON, or a tuple (answer, reward, metrics).
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        explicit = schema.model_dump(exclude_unset=True) if isinstance(schema, BaseModel) else schema
        described: Schema = explicit or schema_of(function, None if callable(name) else name)
        function.valor_tool = FunctionTool(function, described, verl_result)  # type: ignore[attr-defined]
        return function

    return mark(name) if callable(name) else mark


def load_function_tools(path: str) -> list[FunctionTool]:
    """The functions under `@function_tool` in a Python file, in its order. Raises UserError when there are none."""
    module = load_file(path, "rollout.multi_turn.function_tool_path")
    marked = [getattr(value, "valor_tool", None) for value in vars(module).values()]
    tools = [tool for tool in marked if isinstance(tool, FunctionTool)]
    if not tools:
        raise UserError(f"{path} has no function under @function_tool (from valor.agents import function_tool)")
    return list({id(tool): tool for tool in tools}.values())
