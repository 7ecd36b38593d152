"""Countdown and the Game of 24: an expression of the given numbers, each used once, with exactly the target's value."""

import ast
import operator
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from valor.rewards.answers import DENIED_BEFORE, answer_part, boxed
from valor.rewards.numerals import half_width


class Expression(NamedTuple):
    """Its exact value (None: it divides by zero) and the numbers in it, in order."""

    value: Fraction | None
    numbers: list[int]


_SIGNS = str.maketrans("\u00d7\u00b7\u22c5\u00f7\u2212\u2013[]{}", "***/--()()")
_LATEX = [
    (re.compile(r"\*\*(?![\d(\s])|(?<![\d)\s])\*\*|\*\*$"), ""),  # bold; a power stays, and is refused
    (re.compile(r"\\(?:left|right|quad|displaystyle)\b|\\[,;!()\[\]]|[$`]"), " "),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"((\1)/(\2))"),
    (re.compile(r"\\(?:times|cdot)(?![a-z])"), "*"),
    (re.compile(r"\\div(?![a-z])"), "/"),
]
_ANNOUNCED = re.compile(
    r"^.*(?:\b(?:answer|expression|solution|equation)\b|答案|表达式|算式)[^:=\n\d(]*(?::|\bis\b|[是为】])[\s*]*",
    re.IGNORECASE,
)
_ARITHMETIC = re.compile(r"[-+*/().\d\s]*\d[-+*/().\d\s]*")
_OPERATOR = re.compile(r"[\d)]\s*[-+*/]")
_NOT_BEFORE, _NOT_AFTER = re.compile(r"[A-Za-z_^!%]$|[\^%]\s*$"), re.compile(r"[A-Za-z_^!%]")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_MAX_LENGTH, _MAX_DIGITS = 500, 12
_GAME_OF_24 = 24


def grade(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 when the final expression uses every number once, with + - * / only, and equals the target exactly.

    docs/rewards.md says how the ground truth is written, and where the expression is looked for. Components: `format`
    1 when there is an expression, `numbers` 1 when it uses the right ones, `pred` the expression.
    """
    target, numbers = puzzle(ground_truth, extra_info or {})
    text = final_expression(solution_str)
    expression = evaluate(text)
    if expression is None:
        return {"score": 0.0, "format": 0.0, "numbers": 0.0, "pred": ""}
    uses_all = sorted(expression.numbers) == sorted(numbers)
    return {
        "score": float(uses_all and expression.value == target),
        "format": 1.0,
        "numbers": float(uses_all),
        "pred": "".join(text.split()),
    }


def puzzle(ground_truth: Any, extra_info: Mapping[str, Any]) -> tuple[Fraction, list[int]]:
    """Target and numbers. Raises ValueError when they are not there: the data is wrong."""
    fields = {**extra_info, **ground_truth} if isinstance(ground_truth, Mapping) else dict(extra_info)
    in_text = [] if isinstance(ground_truth, Mapping) else [int(n) for n in re.findall(r"-?\d+", str(ground_truth))]
    names = ("numbers", "nums", "puzzle", "Puzzle", "Puzzles", "input")
    numbers = next((fields[name] for name in names if fields.get(name) is not None), None)
    if len(in_text) > 1:
        return Fraction(str(fields.get("target") or _GAME_OF_24)), in_text
    if numbers is None:
        raise ValueError(f"the ground truth has no numbers: {str(ground_truth)[:60]!r}")
    target = in_text[0] if in_text else fields.get("target")
    return Fraction(str(target or _GAME_OF_24)), [int(n) for n in re.findall(r"\d+", str(numbers))]


def final_expression(text: str) -> str:
    """The expression that the response ends with, "" when there is none."""
    scope, _ = answer_part(half_width(text))
    scope = boxed(scope) or scope
    lines = [line for line in scope.splitlines() if line.strip()]
    announced = [i for i, line in enumerate(lines) if _ANNOUNCED.match(line[:_MAX_LENGTH])]
    if announced:
        rest = lines[announced[-1]][:_MAX_LENGTH]
        rest = rest if "不" in rest else _ANNOUNCED.sub("", rest)
        lines = [rest] if rest.strip() else lines[announced[-1] + 1 :][:1]
    return _expression(lines[-1]) if lines and len(lines[-1]) <= _MAX_LENGTH else ""


def evaluate(text: str) -> Expression | None:
    """Exact value of sums, differences, products and quotients of whole numbers; None for anything else."""
    if len(text) > _MAX_LENGTH:
        return None
    numbers: list[int] = []
    try:
        return Expression(_value(ast.parse(text.strip(), mode="eval").body, numbers), numbers)
    except ZeroDivisionError:
        return Expression(None, numbers)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            numbers.append(value)
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, numbers)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](_value(left, numbers), _value(right, numbers))
    raise TypeError("not plain arithmetic")


def _expression(line: str) -> str:
    """The arithmetic in a line: the first side of an equation that has any, without the words around it."""
    for pattern, new in _LATEX:
        line = pattern.sub(new, line)
    sides = line.translate(_SIGNS).split("=")
    for side in sides:
        pieces = [piece for piece in _ARITHMETIC.finditer(side) if _OPERATOR.search(piece[0])]
        if pieces and not re.search(rf"\d{{{_MAX_DIGITS + 1}}}", side):
            longest = max(pieces, key=lambda piece: len(piece[0]))
            before = side[: longest.start()]
            if _NOT_BEFORE.search(before) or _NOT_AFTER.match(side[longest.end() :]) or DENIED_BEFORE.search(before):
                return ""  # round(…), 4!, a power, "is not …"
            return longest[0].strip().rstrip(".")
    return ""
