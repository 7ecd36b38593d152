"""Programs: does the code in a response pass its tests? Competition problems (stdin to stdout), functions with asserts.

The tests never meet the code: outputs of programs are compared here, results of functions in a process of their own
(see valor.sandbox). So a response cannot print, patch or find its way to a verdict.
"""

import ast
import builtins
import json
import math
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.util import find_spec
from typing import Any, NamedTuple

from valor.rewards.answers import after_thinking, tagged
from valor.sandbox import Limits, Sandbox, strongest_level
from valor.sandbox.payload import same

_PYTHON = ("python", "py", "python3")
_BLOCK = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*\1[`~]*\s*?$|\Z)", re.MULTILINE | re.DOTALL
)
_NUMBER = re.compile(r"[-+]?(?:\d{1,40}\.?\d{0,40}|\.\d{1,40})(?:[eE][-+]?\d{1,2})?")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_RESPONSE = ("solution", "main", "your_module")  # modules by which tests mean the response
_RUN = "__run__"
# What solutions of LeetCode's form take for granted, and programs to the graders of LiveCodeBench and PRIME.
_PRELUDE = """\
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from copy import deepcopy
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import add, and_, itemgetter, mul, or_, sub, xor
from string import *
from typing import *
from builtins import pow
"""


_seconds = 8.0


def configure(seconds: float) -> None:
    """Set the time for all tests of one response, in all gradings of this process."""
    global _seconds
    _seconds = seconds


@dataclass(frozen=True)
class ProgramTests:
    """Inputs of a program and the outputs that are right; CPU seconds for each."""

    inputs: Sequence[str]
    outputs: Sequence[str]
    seconds: int = 4


@dataclass(frozen=True)
class FunctionTests:
    """Python texts that call functions of the response, `names` first: see payload.check. `prompt` is Python that the
    response continues or completes, `prelude` comes before it. CPU seconds for all of them."""

    tests: Sequence[str]
    setup: Sequence[str]
    names: Sequence[str]
    prompt: str = ""
    prelude: str = ""
    seconds: int = 4


class _Module(NamedTuple):
    """Texts of a file of tests, each a test (what it defines belongs to the first), and what it imports from the
    response."""

    tests: list[str]
    imported: list[str]


def grade(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    continuous: bool = False,
) -> dict[str, Any]:
    """Score 1 when every test passes, else 0; with `continuous`, the fraction of tests that pass.

    Components: `passed` that fraction, `acc` 1 when it is 1, `format` 1 when the response has a block of code,
    `verdict` the first failure. Raises ValueError for a ground truth that is no test, SandboxError when the sandbox
    fails.
    """
    tests = read_tests(ground_truth)
    name = tests.names[0] if isinstance(tests, FunctionTests) else ""
    code, fenced = extract_code(solution_str, name)
    if not code.strip():
        passed, total, error = 0, 1, "no code"
    elif isinstance(tests, ProgramTests):
        passed, total, error = _run_program(code, tests)
    else:
        passed, total, error = _check_functions(code, fenced, tests)
    fraction = passed / total
    return {
        "score": fraction if continuous else float(passed == total),
        "acc": float(passed == total),
        "passed": fraction,
        "format": float(fenced),
        "verdict": "".join(c if c.isprintable() else " " for c in error or "passed"),
    }


grade.cpu_bound = True  # type: ignore[attr-defined]  # no more programs at once than there are cores


def extract_code(text: str, name: str = "") -> tuple[str, bool]:
    """The code in a response, in its `<answer>` if it has one, and whether it stood in a fenced block; without any, the
    whole text.

    The last Python block counts (without one: the last block that names no language), with `name` the last that
    defines that function. A block that is never closed ends with the text.
    """
    text = after_thinking(text)
    text = tagged(text) or text
    blocks = [(block[2].lower(), textwrap.dedent(block[3].removesuffix("\n"))) for block in _BLOCK.finditer(text)]
    blocks = [b for language, b in blocks if language in _PYTHON] or [b for language, b in blocks if not language]
    if not blocks:
        return text, False
    defining = [block for block in blocks if name and _defines(block, name)]
    return (defining or blocks)[-1], True


def same_output(output: str, expected: str) -> bool:
    """Equal line by line but for white space, blank lines and the spelling of numbers; a fraction may be off by a
    millionth of its size."""
    ours, theirs = ([line.split() for line in text.splitlines() if line.strip()] for text in (output, expected))
    if ours == theirs:
        return True
    return list(map(len, ours)) == list(map(len, theirs)) and all(
        _same_token(a, b) for line, right in zip(ours, theirs, strict=True) for a, b in zip(line, right, strict=True)
    )


def read_tests(ground_truth: Any) -> ProgramTests | FunctionTests:
    """The tests in a ground truth, in any of the forms of docs/sandbox.md. Raises ValueError for anything else."""
    sys.set_int_max_str_digits(0)  # tests may have integers of any length
    truth = _value(ground_truth) if isinstance(ground_truth, str) else ground_truth
    truth = [truth] if isinstance(truth, str) else truth
    if isinstance(truth, Mapping):
        return _tests_of_mapping(truth)
    if isinstance(truth, Iterable) and (tests := list(truth)):
        if all(isinstance(test, str) for test in tests):
            return _assertions(tests)
        cases: list[Mapping[str, Any]] = [test for test in tests if isinstance(test, Mapping)]
        if len(cases) == len(tests) and all({"input", "output"} <= set(case) for case in cases):
            metadata = cases[0].get("metadata") or {}
            metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
            name = metadata.get("func_name") or cases[0].get("fn_name")
            pairs = {"inputs": [case["input"] for case in cases], "outputs": [case["output"] for case in cases]}
            return _tests_of_mapping(pairs | {"fn_name": name})
    raise ValueError(f"the ground truth has no tests: {str(ground_truth)[:80]!r}")


def _tests_of_mapping(truth: Mapping[str, Any]) -> ProgramTests | FunctionTests:
    truth = {name: value for name, value in truth.items() if value is not None}  # which Arrow fills dictionaries with
    if truth.get("test_cases"):
        tests = read_tests(truth["test_cases"])
    elif {"inputs", "outputs"} <= set(truth) and len(truth["inputs"]) == len(truth["outputs"]) > 0:
        if truth.get("fn_name"):
            tests = _call_tests(truth["fn_name"], truth["inputs"], truth["outputs"])
        else:
            tests = ProgramTests(list(map(_as_text, truth["inputs"])), list(map(_as_text, truth["outputs"])))
    elif truth.get("test") and truth.get("entry_point"):
        name, prompt = truth["entry_point"].removeprefix("Solution()."), truth.get("prompt") or ""
        try:
            compile(prompt, "prompt", "exec")
            setup = [prompt]  # its helpers, as the prompt has them and not as the response has them
        except (SyntaxError, ValueError):
            setup = []
        tests = FunctionTests([f"{truth['test']}\n\ncheck({name})\n"], setup, [name], prompt)
    elif truth.get("test") or truth.get("functional"):
        tests = _assertions([truth.get("test") or truth["functional"]])
    elif len(truth.get("test_list", ())):
        setup = [*truth.get("test_imports", ()), truth.get("test_setup_code") or ""]
        tests = _assertions(list(truth["test_list"]), setup)
    else:
        raise ValueError(f"the ground truth has no tests, it has {', '.join(map(str, truth)) or 'nothing'}")
    return replace(tests, seconds=math.ceil(float(truth["time_limit"]))) if truth.get("time_limit") else tests


def _assertions(tests: Sequence[str], setup: Sequence[str] = ()) -> FunctionTests:
    modules = [_module(test) for test in tests]
    tests = [test for module in modules for test in module.tests]
    nodes = [node for test in tests for node in _nodes(test)]
    called = dict.fromkeys(name for name in map(_called, nodes) if name and name != _RUN)
    unknown = [name for name in called if not any(_defines(text, name) for text in (*setup, *tests))]
    judges: set[str | None] = set()  # what is asserted of the result of another function has to be the tests' own
    for node in nodes:
        if isinstance(node, ast.Assert):
            asserted = getattr(node.test, "operand", node.test)  # assert f(x), assert not f(x)
            if any(_called(inner) in unknown for inner in ast.walk(asserted) if inner is not asserted):
                judges.add(_called(asserted))
    # Names that Python has are Python's, or `abs = lambda x: 0` would pass many tests; unless no others are called.
    candidates = [n for n in unknown if not (hasattr(builtins, n) or hasattr(math, n) or n in judges)]
    imported = [name for module in modules for name in module.imported]
    return FunctionTests(tests, setup, list(dict.fromkeys([*imported, *candidates])) or unknown or [""])


def _module(test: str) -> _Module:
    """Raises ValueError for what is not Python, and for tests that cannot run here."""
    body, imported, runs = [], [], []
    tree = _parsed(test)
    for statement in tree.body:
        if isinstance(statement, ast.If) and "'__name__'" in ast.dump(statement.test):
            body += [inner for inner in statement.body if ".main(" not in ast.unparse(inner)]
            continue
        if isinstance(statement, ast.ImportFrom) and statement.module in _RESPONSE:
            imported += [alias.name for alias in statement.names if alias.name != "*"]
            renamed = [f"{alias.asname} = {alias.name}" for alias in statement.names if alias.asname]
            body += _parsed("\n".join(renamed)).body
            continue
        body.append(statement)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            _installed(statement)
        elif isinstance(statement, _DEFINITIONS) and _is_test(statement):
            runs.append(f"{_RUN}({statement.name})")
    text = test if body == tree.body else ast.unparse(ast.Module(body, []))
    return _Module([f"{text}\n{runs[0]}", *runs[1:]] if runs else [text], imported)


def _is_test(statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether pytest or unittest would run it. Raises ValueError for what only they can run: fixtures, coroutines."""
    if isinstance(statement, ast.ClassDef):
        bases = [ast.unparse(base) for base in statement.bases]
        is_case = any(base.endswith("TestCase") for base in bases) or (statement.name.startswith("Test") and not bases)
        return is_case and True in [_is_test(method) for method in statement.body if isinstance(method, _DEFINITIONS)]
    decorators = [ast.unparse(decorator) for decorator in statement.decorator_list]
    is_test = statement.name.startswith("test")
    needs = [argument.arg for argument in statement.args.args if argument.arg != "self"]
    has_cases = any("parametrize" in decorator for decorator in decorators)
    if any("fixture" in text for text in decorators) or (is_test and needs and not has_cases):
        raise ValueError(f"the ground truth has a test with fixtures, which are not supported: {statement.name}")
    if is_test and isinstance(statement, ast.AsyncFunctionDef):
        raise ValueError(f"the ground truth has a test that is a coroutine, which is not supported: {statement.name}")
    return is_test


def _installed(statement: ast.Import | ast.ImportFrom) -> None:
    names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else [statement.module or ""]
    for name in names:
        if find_spec(name.partition(".")[0]) is None:
            raise ValueError(f"the ground truth has a test that imports {name}, which is not installed")


def _called(node: ast.AST) -> str | None:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def _parsed(test: str) -> ast.Module:
    try:
        return ast.parse(test)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the ground truth has a test that is not Python: {test[:80]!r} ({error})") from None


def _nodes(test: str) -> list[ast.AST]:
    """What a test consists of, in the order of the text."""
    tree = _parsed(test)
    # Definitions alone check nothing: HumanEval's check() has to be called.
    statements = [s for s in tree.body if not isinstance(s, _DEFINITIONS)]
    if not any(isinstance(node, ast.Call | ast.Assert) for s in statements for node in ast.walk(s)):
        raise ValueError(f"the ground truth has a test that checks nothing: {test[:80]!r}")
    return sorted(ast.walk(tree), key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)))


def _call_tests(name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> FunctionTests:
    if not name.isidentifier():
        raise ValueError(f"fn_name {name!r} is no name of a function")
    calls = [[_value(s) for s in i.splitlines() if s.strip()] if isinstance(i, str) else list(i) for i in inputs]
    results = [_value(output) if isinstance(output, str) else output for output in outputs]
    data = f"nan, inf = float('nan'), float('inf')\nCALLS = {calls!r}\nRESULTS = {results!r}"
    # APPS wraps every result in a list of one.
    wrapped = all(isinstance(result, list) and len(result) == 1 for result in results)
    test = "got = {0}(*CALLS[{1}]); assert __same__(got, RESULTS[{1}])" + (
        " or __same__(got, RESULTS[{1}][0])" * wrapped
    )
    return FunctionTests([test.format(name, i) for i in range(len(calls))], [data], [name], prelude=_PRELUDE)


def _run_program(code: str, tests: ProgramTests) -> tuple[int, int, str | None]:
    """Passed, total, and what went wrong first."""
    with _sandbox(tests.seconds) as sandbox:
        end = time.monotonic() + _seconds
        passed, error = _run_inputs(sandbox, code, tests, end)
        if "NameError" in (error or ""):  # not before: the imports take as long as a short program
            passed, error = _run_inputs(sandbox, f"{_PRELUDE}{code}", tests, end)
    return passed, len(tests.inputs), error


def _run_inputs(sandbox: Sandbox, code: str, tests: ProgramTests, end: float) -> tuple[int, str | None]:
    """Passed, and what went wrong first. After a test that found no end no further ones are run."""
    total, passed, done, first = len(tests.inputs), 0, 0, None
    for outcome in sandbox.run_all(code, tests.inputs, end):
        if outcome.error is None and same_output(outcome.stdout, tests.outputs[done]):
            passed += 1
        elif first is None:
            first = f"test {done + 1} of {total}: {outcome.error or 'wrong output'}"
        done += 1
        if outcome.timed_out:
            break
    if done < total and first is None:
        first = f"{done} of {total} tests took {_seconds:.3g} s: raise reward.timeout"
    return passed, first


def _check_functions(code: str, fenced: bool, tests: FunctionTests) -> tuple[int, int, str | None]:
    prompt = tests.prompt
    if not prompt or _defines(code, tests.names[0]):
        prelude = tests.prelude or _PRELUDE * _defines(code, "Solution")
        codes = [f"{prelude}{prompt}\n\n{code}", code]
    else:  # the body of the function that the prompt begins
        codes = [f"{prompt}\n{textwrap.indent(code, '    ')}"] * fenced + [f"{prompt}{code}"]
    with _sandbox(tests.seconds) as sandbox:
        return sandbox.check(codes, tests.setup, tests.tests, tests.names)


def _sandbox(cpu_seconds: int) -> Sandbox:
    return Sandbox(strongest_level(), Limits(cpu_seconds=cpu_seconds, wall_seconds=_seconds))


def _defines(code: str, name: str) -> bool:
    start = rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+(?:{re.escape(name)}|Solution)\b|^{re.escape(name)}[ \t]*="
    return bool(name) and re.search(start, code, re.MULTILINE) is not None


def _value(text: str) -> Any:
    """What JSON makes of a text; a text that is none stands for itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _as_text(value: Any) -> str:
    """A text or a number, or a list of lines."""
    return str(value) if isinstance(value, str | int | float) else "\n".join(map(str, value))


def _same_token(ours: str, right: str) -> bool:
    if ours == right:
        return True
    if not (_NUMBER.fullmatch(ours) and _NUMBER.fullmatch(right)):
        return False
    if right.lstrip("+-").isdigit():
        return Fraction(ours) == Fraction(right)
    return same(float(ours), float(right))
