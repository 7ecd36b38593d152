"""Tools that come with Valor, by name in a tools file: Python in the sandbox, search, sub-agents, MCP servers'."""

import json
import time
from collections.abc import Callable
from typing import Any

from valor.agents.mcp_tools import mcp_tools
from valor.agents.search.client import SearchFailed, open_retriever, results_text
from valor.agents.sub_agent import make_sub_agent
from valor.agents.tools import ToolError, ToolResult
from valor.errors import UserError
from valor.sandbox import Limits, Sandbox, SandboxError, strongest_level

_BOUNDS = ("num_workers", "rate_limit")  # verl's threads and Ray actors; here they bound the requests under way
# Runs inside the sandbox: errors and what is printed in one stream, then the value of the last line, as in a console.
_CONSOLE = """
import ast, sys, traceback
sys.stderr = sys.stdout
tree, names = None, {"__name__": "__main__"}
try:
    tree = ast.parse(SOURCE)
    last = tree.body.pop().value if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "code", "exec"), names)
    value = eval(compile(ast.Expression(last), "code", "eval"), names) if last else None
    if value is not None:
        print(repr(value))
except Exception as error:
    error.__traceback__ = error.__traceback__.tb_next if tree else None
    traceback.print_exception(error)
"""


def make_python(cpu_seconds: int = 4, memory_mb: int = 512) -> Callable[[str], ToolResult]:
    """The tool `python`, with limits on CPU time and memory of a call; no network, no files, no state between calls.

    Raises UserError when code cannot be enclosed on this machine.
    """
    try:
        level = strongest_level()
    except SandboxError as error:
        raise UserError(f"the tool python: {error}") from error
    limits = Limits(cpu_seconds=cpu_seconds, wall_seconds=2.0 * cpu_seconds, memory_mb=memory_mb)

    def python(code: str) -> ToolResult:
        """Run Python code in a fresh interpreter. Answers what it prints, and the value of its last line.

        Args:
            code: The code.
        """
        program = _CONSOLE.replace("SOURCE", repr(code), 1)
        with Sandbox(level, limits) as sandbox:
            (outcome,) = sandbox.run_all(program, [""], time.monotonic() + limits.wall_seconds)
        if outcome.error is None:
            return ToolResult(outcome.stdout.rstrip("\n"))
        text = f"{outcome.stdout.rstrip()}\nError: {outcome.error}.".lstrip("\n")
        return ToolResult(text, error="timeout" if outcome.timed_out else "failed")

    python.cpu_bound = True  # type: ignore[attr-defined]
    return python


def make_search(enable_global_rate_limit: bool = True, **config: Any) -> Callable[..., Any]:
    """verl's tool `search`; a failure is the reply's text, and counted as `failed`.

    `config` has verl's keys (`retrieval_service_url`, `topk`, `default_timeout`, `num_workers`, `rate_limit`) or those
    of `open_retriever`; a `corpus` is searched in this process. TypeError: an unknown key.
    """
    names = {"retrieval_service_url": "url", "default_timeout": "timeout"}
    options = {names.get(key, key): value for key, value in config.items() if key not in _BOUNDS}
    if bounds := [config[bound] for bound in _BOUNDS if bound in config]:
        options["max_concurrent"] = min(bounds)
    retriever = open_retriever(**options)

    async def search(query_list: list[str]) -> ToolResult:
        """Searches for relevant information based on queries.

        Args:
            query_list: List of search queries
        """
        error: ToolError | None = None
        try:
            results = await retriever.retrieve(query_list)
            text = results_text(results) if any(results) else "No search results found."
        except SearchFailed as failure:
            text, error = f"Search error: {failure}", "failed"
        return ToolResult(json.dumps({"result": text}, ensure_ascii=False), error=error)

    search.takes_kwargs = True  # type: ignore[attr-defined]  # verl's rows repeat the ground truth there, unread
    return search


BUILTIN_TOOLS: dict[str, Callable[..., Any]] = {
    "python": make_python,
    "search": make_search,
    "mcp": mcp_tools,
    "sub_agent": make_sub_agent,
}
"""Each makes a function, or several FunctionTools, from the `config` of its entry in a tools file."""
