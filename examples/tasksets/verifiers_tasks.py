"""Task sets of verifiers 0.4 (its v1 API: Taskset, Task, rewards, toolsets), played by our loop.

valor ppo data.taskset=examples/tasksets/verifiers_tasks.py:Verifiers actor_rollout_ref.model.path=MODEL \\
    'data.taskset_kwargs={name: examples/tasksets/capitals.py:CapitalsTaskset}'

Needs `pip install 'verifiers>=0.4'`. The policy has the conversation of the task's prompt and tools, which run in this
process; a turn without calls ends it. Rewards, metrics and `@stop` read a Trace of verifiers' own class, and where they
ask for a runtime they get its subprocess runtime: programs of the task's author run as this user. What needs a
container, a harness or several agents is refused.
"""

# pyright: reportMissingImports=false
# verifiers is installed by those who use its task sets.

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from itertools import islice
from typing import Any

from valor.agents.env import Env
from valor.agents.formats import Schema
from valor.agents.tools import as_text
from valor.errors import UserError
from valor.user_files import installed, load_object

_INSTALL = "'verifiers>=0.4'"
_HOOKS = ("reward", "metric", "stop")


def _library() -> Any:
    return installed("verifiers.v1", "task sets of verifiers need its package", _INSTALL)


def _class_of(name: str) -> Any:
    """The class of an installed task set of verifiers, or of `file.py:Class`. UserError: it is none."""
    from verifiers.v1.utils import loaders

    try:
        cls = load_object(name, "name") if ":" in name else loaders.taskset_class(name)
    except ModuleNotFoundError:
        raise UserError(f"name={name}: no such task set of verifiers is installed") from None
    if not (isinstance(cls, type) and any(c.__module__ == "verifiers.v1.taskset" for c in cls.__mro__)):
        raise UserError(f"name={name}: is no task set of verifiers")
    return cls


class Verifiers(Env):
    """One rollout of a task. Tools of the task's own toolsets are made anew for each, those of the task set once."""

    _tasks: Sequence[Any]
    _shared: Sequence[Any]

    @classmethod
    def rows(cls, name: str, most: int | None = None, **config: Any) -> list[dict[str, Any]]:
        """The first `most` tasks of the task set `name` (installed, or `file.py:Class`); `config`: fields of its own.

        UserError: there is no such task set, or it cannot be played here.
        """
        vf = _library()
        from verifiers.v1.utils.generic import concrete_type

        made = _class_of(name)
        fields = concrete_type(made, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
        taskset = made(fields.model_validate(config))
        if most is None and not taskset.bounded:
            raise UserError("its tasks never end: set most in data.taskset_kwargs")
        cls._tasks, cls._shared = list(islice(taskset, most)), made.toolsets(taskset.config)
        for task in cls._tasks:
            _check(task)
        with ThreadPoolExecutor(1) as thread:  # an event loop may be running here
            for toolset in cls._shared:
                thread.submit(asyncio.run, toolset.setup()).result()
        return [{"prompt": _prompt(t), "data_source": name, "reward_model": {"style": "model"}} for t in cls._tasks]

    def __init__(self) -> None:
        self._open = AsyncExitStack()
        self._use(self._tasks[0])

    def _use(self, task: Any) -> None:
        self._toolsets = [*self._shared, *type(task).toolsets(task.config)]
        self._functions = {name: function for toolset in self._toolsets for name, function in _functions(toolset)}

    async def reset(self, row: Mapping[str, Any]) -> None:
        vf = _library()
        from verifiers.v1.runtimes import make_runtime
        from verifiers.v1.state import state_cls

        task = self._task = self._tasks[row["extra_info"]["task"]]
        self._use(task)
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig()))
        self._trace = vf.Trace(task=about, state=state_cls(type(task))(), agent=agent)
        kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
        for message in row["messages"]:
            self._note(kinds[message["role"]](content=message["content"]))
        self._runtime = None
        hooks = [task.setup, task.finalize, *(hook for kind in _HOOKS for hook in task.hooks(kind))]
        if any("runtime" in inspect.signature(hook).parameters for hook in hooks if not _is_default(hook)):
            self._runtime = make_runtime(vf.SubprocessConfig())
            await self._runtime.start()
            self._open.push_async_callback(self._runtime.stop)
        for toolset in self._toolsets:
            if toolset not in self._shared:
                await toolset.setup()
                await toolset.setup_task(task.data)
                self._open.push_async_callback(toolset._exit_stack.aclose)
        await self._invoke(task.setup)

    async def heard(self, text: str) -> bool:
        self._note(_library().AssistantMessage(content=text), sampled=True)
        for stop in self._task.hooks("stop"):
            if await self._invoke(stop):
                self._trace.stop(stop.__name__)
                return True
        return False

    def schemas(self) -> list[Schema]:
        from mcp.server.mcpserver import MCPServer

        server = MCPServer("tools")
        for name, function in self._functions.items():
            server.add_tool(function, name=name, description=inspect.getdoc(function))
        tools = [tool.model_dump(by_alias=True) for tool in server._tool_manager.list_tools()]
        keys = ("name", "description", "parameters")
        return [{"type": "function", "function": {key: tool[key] for key in keys}} for tool in tools]

    def tool(self, name: str) -> Callable[..., Any]:
        function = self._functions[name]

        async def call_later(**arguments: Any) -> str:
            with self._called(name, arguments) as note:
                return note(await function(**arguments))

        def call(**arguments: Any) -> str:
            with self._called(name, arguments) as note:
                return note(function(**arguments))

        return call_later if inspect.iscoroutinefunction(function) else call

    @contextmanager
    def _called(self, name: str, arguments: Mapping[str, Any]) -> Iterator[Callable[[Any], str]]:
        """A call by the last turn, with the rollout's state; what it gives notes the answer, and returns its text."""
        vf = _library()
        from verifiers.v1.mcp.server import _call_state

        said, call_id = self._trace.assistant_messages[-1], f"call_{len(self._trace.nodes)}"
        made = vf.ToolCall(id=call_id, name=name, arguments=json.dumps(arguments))
        said.tool_calls = [*(said.tool_calls or ()), made]

        def note(answer: Any) -> str:
            self._note(vf.ToolMessage(tool_call_id=call_id, content=as_text(answer), name=name))
            return as_text(answer)

        before = _call_state.set(self._trace.state)
        try:
            yield note
        finally:
            _call_state.reset(before)

    async def score(self) -> float:
        await self._invoke(self._task.finalize)
        await self._task.score(self._trace, self._runtime)
        return self._trace.reward

    async def close(self) -> None:
        await self._open.aclose()

    def _note(self, message: Any, sampled: bool = False) -> None:
        nodes = self._trace.nodes
        nodes.append(_library().MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))

    async def _invoke(self, hook: Callable[..., Any]) -> Any:
        from verifiers.v1.utils.decorators import invoke

        if _is_default(hook):
            return None
        known = {"task": self._task.data, "trace": self._trace, "runtime": self._runtime}
        result = invoke(hook, {**known, type(self._trace): self._trace})
        return await result if inspect.isawaitable(result) else result


def _functions(toolset: Any) -> list[tuple[str, Callable[..., Any]]]:
    """The tools of a server under the names that models read."""
    from verifiers.v1.utils.decorators import discover_decorated

    prefix = f"{toolset.server_name}_" if toolset.server_name else ""
    return [(prefix + (getattr(f, "tool_name", None) or f.__name__), f) for f in discover_decorated(toolset, "tool")]


def _is_default(hook: Callable[..., Any]) -> bool:
    """Whether it is a hook of verifiers' own Task, which does nothing."""
    return getattr(hook, "__module__", None) == "verifiers.v1.task"


def _prompt(task: Any) -> list[dict[str, str]]:
    from verifiers.v1.types import content_text

    data, system = task.data, task.data.system_prompt
    messages = [{"role": "system", "content": system}] if system else []
    if isinstance(data.prompt, str):
        return [*messages, {"role": "user", "content": data.prompt}]
    return [*messages, *({"role": m.role, "content": content_text(m.content)} for m in data.prompt)]


def _check(task: Any) -> None:
    """UserError: what the task needs is not to be had here."""
    from verifiers.v1.session import hook_boundary
    from verifiers.v1.utils.decorators import discover_decorated

    toolsets = type(task).toolsets(task.config)
    read = [hook for hook in task.hooks("stop") if hook_boundary(hook, allow_trace=True) is not _library().Trace]
    reasons = {
        "no prompt: a program of the task set leads its conversation": task.data.prompt is None,
        f"the image {task.data.image}: containers are not started here": task.data.image is not None,
        "NEEDS_CONTAINER": type(task).NEEDS_CONTAINER,
        "hooks that read requests or answers (@intercept, @stop)": bool(discover_decorated(task, "intercept") or read),
        "a judge: name one with reward.reward_model.judge": bool(task.config.judges),
        "tools of a server elsewhere: list it in multi_turn.tool_config_path": any(
            not _functions(toolset) or getattr(toolset.config, "url", None) for toolset in toolsets
        ),
    }
    if reason := next((reason for reason, is_so in reasons.items() if is_so), None):
        raise UserError(f"task {task.data.idx} has {reason}")
