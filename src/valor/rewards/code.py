"""Programs: does the code in a response pass its tests? Competition problems (stdin to stdout), functions with asserts.

The tests never meet the code: outputs of programs are compared here, results of functions in a process of their own
(see valor.sandbox). So a response cannot print, patch or find its way to a verdict.
"""

import ast
import builtins
import json
import math
import re
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from valor.rewards.answers import after_thinking
from valor.sandbox import Limits, Sandbox, strongest_level
from valor.sandbox.payload import same

_PYTHON = ("python", "py", "python3")
_FENCE = re.compile(r"(`{3,}|~{3,})\s*([\w+#.-]*)")
_LONG = 4000  # digits of an integer that stays text: Python refuses to read or print one of more than 4,300
_LONG_LITERAL = re.compile(rf"\d{{{_LONG},}}")
_NUMBER = re.compile(r"[-+]?(?:\d{1,40}\.?\d{0,40}|\.\d{1,40})(?:[eE][-+]?\d{1,2})?")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# What solutions of LeetCode's form take for granted.
_PRELUDE = """\
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, factorial, floor, gcd, inf, isqrt, lcm, log, log2, pi, sqrt
from typing import *
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
    seconds: int = 2


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
    """The code in a response, and whether it stood in a fenced block; without any, the whole text.

    The last Python block counts (without one: the last block that names no language), with `name` the last that
    defines that function. A block that is never closed ends with the text.
    """
    text = after_thinking(text)
    blocks = _fenced_blocks(text)
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
    given = ground_truth
    if isinstance(given, str):
        try:
            given = _from_json(given)
        except ValueError:
            given = [given]
    if isinstance(given, Mapping):
        return _tests_of_mapping(given)
    if isinstance(given, Iterable) and not isinstance(given, str) and (tests := list(given)):
        if all(isinstance(test, str) for test in tests):
            return _assertions(tests)
        cases: list[Mapping[str, Any]] = [test for test in tests if isinstance(test, Mapping)]
        if len(cases) == len(tests) and all({"input", "output"} <= set(case) for case in cases):
            name = (cases[0].get("metadata") or {}).get("func_name")
            pairs = {"inputs": [case["input"] for case in cases], "outputs": [case["output"] for case in cases]}
            return _tests_of_mapping(pairs | {"fn_name": name})
    raise ValueError(f"the ground truth has no tests: {str(ground_truth)[:80]!r}")


def _tests_of_mapping(given: Mapping[str, Any]) -> ProgramTests | FunctionTests:
    found: ProgramTests | FunctionTests | None = None
    if {"inputs", "outputs"} <= set(given) and len(given["inputs"]) == len(given["outputs"]) > 0:
        if given.get("fn_name"):
            found = _call_tests(given["fn_name"], given["inputs"], given["outputs"])
        else:
            found = ProgramTests(list(map(_as_text, given["inputs"])), list(map(_as_text, given["outputs"])))
    elif given.get("test") and given.get("entry_point"):
        name, prompt = given["entry_point"], given.get("prompt") or ""
        try:
            compile(_LONG_LITERAL.sub("0", prompt), "prompt", "exec")
            setup = [prompt]  # its helpers, as they were given and not as they are answered
        except (SyntaxError, ValueError):
            setup = []
        found = FunctionTests([f"{given['test']}\n\ncheck({name})\n"], setup, [name], prompt)
    elif len(given.get("test_list", ())):
        setup = [*given.get("test_imports", ()), given.get("test_setup_code") or ""]
        found = _assertions(list(given["test_list"]), setup)
    if found is not None and given.get("time_limit"):
        found = replace(found, seconds=math.ceil(given["time_limit"]))
    if found is None:
        raise ValueError(f"the ground truth has no tests, it has {', '.join(map(str, given)) or 'nothing'}")
    return found


def _assertions(tests: Sequence[str], setup: Sequence[str] = ()) -> FunctionTests:
    nodes = [node for test in tests for node in _nodes(test)]
    called = dict.fromkeys(name for name in map(_called, nodes) if name)
    unknown = [name for name in called if not any(_defines(text, name) for text in (*setup, *tests))]
    judges: set[str | None] = set()  # what is asserted of the result of another function has to be the tests' own
    for node in nodes:
        if isinstance(node, ast.Assert):
            asserted = getattr(node.test, "operand", node.test)  # assert f(x), assert not f(x)
            if any(_called(inner) in unknown for inner in ast.walk(asserted) if inner is not asserted):
                judges.add(_called(asserted))
    # Names that Python has are Python's, or `abs = lambda x: 0` would pass many tests; unless no others are called.
    own = [n for n in unknown if not (hasattr(builtins, n) or hasattr(math, n) or n in judges)]
    return FunctionTests(tests, setup, own or unknown or [""])


def _called(node: ast.AST) -> str | None:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def _nodes(test: str) -> list[ast.AST]:
    """What a test consists of, in the order of the text."""
    try:
        tree = ast.parse(_LONG_LITERAL.sub("0", test))  # what is called counts here, and no value
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the ground truth has a test that is not Python: {test[:80]!r} ({error})") from None
    # Definitions alone check nothing: HumanEval's check() has to be called.
    statements = [s for s in tree.body if not isinstance(s, _DEFINITIONS)]
    if not any(isinstance(node, ast.Call | ast.Assert) for s in statements for node in ast.walk(s)):
        raise ValueError(f"the ground truth has a test that checks nothing: {test[:80]!r}")
    return sorted(ast.walk(tree), key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)))


def _call_tests(name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> FunctionTests:
    if not name.isidentifier():
        raise ValueError(f"fn_name {name!r} is no name of a function")
    calls = [
        [_from_json(line) for line in i.splitlines() if line.strip()] if isinstance(i, str) else list(i) for i in inputs
    ]
    results = [_from_json(output) if isinstance(output, str) else output for output in outputs]
    data = f"nan, inf = float('nan'), float('inf')\nCALLS = {_printable(calls)!r}\nRESULTS = {_printable(results)!r}"
    # APPS wraps every result in a list of one.
    wrapped = all(isinstance(result, list) and len(result) == 1 for result in results)
    test = "got = {0}(*CALLS[{1}]); assert __same__(got, RESULTS[{1}])" + (
        " or __same__(got, RESULTS[{1}][0])" * wrapped
    )
    return FunctionTests([test.format(name, i) for i in range(len(calls))], [data], [name], prelude=_PRELUDE)


def _run_program(code: str, tests: ProgramTests) -> tuple[int, int, str | None]:
    """Passed, total, and what went wrong first. After one that found no end, no further tests are run."""
    total, passed, done, first = len(tests.inputs), 0, 0, None
    with _sandbox(tests.seconds) as sandbox:
        for outcome in sandbox.run_all(code, tests.inputs, time.monotonic() + _seconds):
            if outcome.error is None and same_output(outcome.stdout, tests.outputs[done]):
                passed += 1
            elif first is None:
                first = f"test {done + 1} of {total}: {outcome.error or 'wrong output'}"
            done += 1
            if outcome.timed_out:
                break
    if done < total and first is None:
        first = f"{done} of {total} tests took {_seconds:.3g} s: raise reward.timeout"
    return passed, total, first


def _check_functions(code: str, fenced: bool, tests: FunctionTests) -> tuple[int, int, str | None]:
    prompt, whole = tests.prompt, not tests.prompt or _defines(code, tests.names[0])
    if whole:
        codes = [f"{tests.prelude}{prompt}\n\n{code}", code]
    else:  # the body of the function that the prompt begins
        codes = [f"{prompt}\n{textwrap.indent(code, '    ')}"] * fenced + [f"{prompt}{code}"]
    with _sandbox(tests.seconds) as sandbox:
        return sandbox.check(codes, tests.setup, tests.tests, tests.names)


def _sandbox(cpu_seconds: int) -> Sandbox:
    return Sandbox(strongest_level(), Limits(cpu_seconds=cpu_seconds, wall_seconds=_seconds))


def _fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of each fenced block, in order, without the indentation that it has as a whole."""
    blocks: list[tuple[str, str]] = []
    fence, language, lines = "", "", []
    for line in text.splitlines():
        mark = line.strip()
        if not fence and (opening := _FENCE.match(mark)):
            fence, language, lines = opening[1], opening[2].lower(), []
        elif fence and mark.startswith(fence) and not mark.strip(fence[0]):
            blocks.append((language, textwrap.dedent("\n".join(lines))))
            fence = ""
        elif fence:
            lines.append(line)
    return [*blocks, (language, textwrap.dedent("\n".join(lines)))] if fence else blocks


def _defines(code: str, name: str) -> bool:
    start = rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+(?:{re.escape(name)}|Solution)\b|^{re.escape(name)}[ \t]*="
    return bool(name) and re.search(start, code, re.MULTILINE) is not None


class _Digits(str):
    """A long integer as its digits, which is also how it is written in Python."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _from_json(text: str) -> Any:
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < _LONG else _Digits(digits))


def _printable(value: Any) -> Any:
    """The value with its long integers as `_Digits`."""
    if isinstance(value, list | tuple):
        return type(value)(map(_printable, value))
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    is_long = isinstance(value, int) and value.bit_length() > 3 * _LONG  # a digit is 3.3 bits
    return _Digits(f"{Decimal(value):f}") if is_long else value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, _printable(value)))


def _same_token(ours: str, right: str) -> bool:
    if ours == right:
        return True
    if not (_NUMBER.fullmatch(ours) and _NUMBER.fullmatch(right)):
        return False
    if right.lstrip("+-").isdigit():
        return Fraction(ours) == Fraction(right)
    return same(float(ours), float(right))
