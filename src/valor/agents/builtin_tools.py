"""Tools that come with Valor, by name in a tools file: a calculator, Python in the sandbox, search."""

import ast
import json
import operator
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from valor.agents.search.client import SearchFailed, open_retriever, results_text
from valor.agents.tools import ToolResult
from valor.errors import UserError
from valor.sandbox import Limits, Sandbox, SandboxError, strongest_level

_MAX_LENGTH = 500  # characters of an expression
_MAX_BITS = 4096  # of a power, and of the result
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


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses.
    """
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"the expression is longer than {_MAX_LENGTH} characters")
    try:
        value = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("this is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    if not isinstance(value, Fraction) or value.denominator > 1:
        return format(float(value), ".12g")
    if value.numerator.bit_length() > _MAX_BITS:
        raise ValueError("the result is too large")
    return str(value.numerator)


def _value(node: ast.expr) -> Fraction | float:
    """Exact as long as no root is drawn."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=operation, operand=operand) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](_value(operand))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](_value(left), _value(right))
    raise ValueError("only numbers with + - * / // % ** and parentheses can be computed")


def _power(base: Fraction | float, exponent: Fraction | float) -> Fraction | float:
    if isinstance(base, Fraction) and exponent == int(exponent):
        if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent) > _MAX_BITS:
            raise ValueError("the power is too large")
        return base ** int(exponent)
    if base < 0:
        raise ValueError("the root of a negative number")
    return float(base) ** float(exponent)


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


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
        try:
            results, error = await retriever.retrieve(query_list), None
            text = results_text(results) if any(results) else "No search results found."
        except SearchFailed as failure:
            text, error = f"Search error: {failure}", "failed"
        return ToolResult(json.dumps({"result": text}, ensure_ascii=False), error=error)

    return search


BUILTIN_TOOLS: dict[str, Callable[..., Callable[..., Any]]] = {
    "calculator": lambda: calculator,
    "python": make_python,
    "search": make_search,
    "verl.tools.search_tool.SearchTool": make_search,
}
"""What makes each, from the `config` of its entry in a tools file."""
