"""Formulas of school algebra as functions of their variables: two are the same when their values are, at some points.

Rational values are exact, others double precision. What this cannot read (integrals, matrices, words) is left to
math-verify; what it can read it decides in microseconds where computer algebra takes a tenth of a second.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Mapping
from fractions import Fraction
from operator import truediv
from typing import NamedTuple

from valor.rewards.mathematics.formulas import Node, Reader, Unreadable
from valor.rewards.mathematics.values import Value, calculate


class Expression(NamedTuple):
    """A formula; `degrees` when a ° stands outside of trigonometric functions."""

    value: Node
    variables: frozenset[str]
    degrees: bool = False


_MAX_LENGTH = 1000
_POSITIVE, _MIXED = 3, 2  # points
_RELATIVE, _ABSOLUTE = 1e-9, 1e-12


def read_expression(text: str) -> Expression | None:
    """A normalized text as a formula, None when it is not one that this module knows."""
    if len(text) > _MAX_LENGTH:
        return None
    reader = Reader(text)
    try:
        value = reader.sum()
        if reader.peek():
            return None
    except Unreadable:
        return None
    return Expression(value, frozenset(reader.variables), reader.degrees)


def same_expression(first: Expression, second: Expression) -> bool | None:
    """Whether the values agree at three points with positive variables, and where both are real at two with any.

    Variables whose names differ only in upper and lower case may be meant to be the same. None when neither has a
    value that can be calculated at any point; when only one has, they differ.
    """
    if first.variables != second.variables and len(first.variables) == len(second.variables):
        by_case = {name.lower(): name for name in first.variables}
        if by_case.keys() == {name.lower() for name in second.variables} and len(by_case) == len(first.variables):
            second = second._replace(
                value=lambda env, f=second.value, names=second.variables: f(
                    {n: env[by_case[n.lower()]] for n in names}
                ),
                variables=first.variables,
            )
    verdict: bool | None = None
    lopsided = False
    for k, env in enumerate(_points(first.variables | second.variables)):
        a, b = _at(first, env), _at(second, env)
        if a is None or b is None:
            lopsided |= (a is None) != (b is None)
            continue
        if k >= _POSITIVE and (_imaginary(a) or _imaginary(b)):
            continue
        if not same_value(a, b) and not (first.degrees != second.degrees and _same_angle(first, a, b)):
            return False
        verdict = True
    return False if verdict is None and lopsided else verdict


def proportional(first: Expression, second: Expression, positive: bool = False) -> bool:
    """Whether one is a constant times the other (not zero, or `positive`) at all points where both have a value."""
    ratios = []
    for env in _points(first.variables | second.variables):
        a, b = _at(first, env), _at(second, env)
        if a is None or b is None or not a or not b:
            continue
        ratios.append(calculate(truediv, a, b))
    if positive and any(complex(ratio).real <= 0 for ratio in ratios):
        return False
    return len(ratios) > 1 and all(same_value(ratio, ratios[0]) for ratio in ratios)


def _points(names: frozenset[str]) -> list[dict[str, Value]]:
    """Values for the variables: positive ones first, then of both signs."""
    points: list[dict[str, Value]] = []
    for k in range(_POSITIVE + _MIXED if names else 1):
        point: dict[str, Value] = {}
        for i, name in enumerate(sorted(names)):
            sign = -1 if k >= _POSITIVE and (i + k) % 2 == 0 else 1
            point[name] = Fraction(sign * (17 + 7 * i + 11 * k), 13 + 2 * k)
        points.append(point)
    return points


def same_value(a: Value, b: Value) -> bool:
    """Exactly for two rationals, to nine digits otherwise."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    try:
        return cmath.isclose(complex(a), complex(b), rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    except OverflowError:
        return False


def constant(expression: Expression) -> Value | None:
    """Its value if it has no variables and can be evaluated."""
    return None if expression.variables else _at(expression, {})


def _at(expression: Expression, env: Mapping[str, Value]) -> Value | None:
    try:
        value = expression.value(env)
        return value if isinstance(value, Fraction) or cmath.isfinite(value) else None
    except (ArithmeticError, ValueError, RecursionError):
        return None


def _imaginary(value: Value) -> bool:
    return not isinstance(value, Fraction) and abs(value.imag) > _RELATIVE * abs(value)


def _same_angle(first: Expression, a: Value, b: Value) -> bool:
    degrees, radians = (a, b) if first.degrees else (b, a)
    return same_value(complex(degrees) * math.pi / 180, radians)
