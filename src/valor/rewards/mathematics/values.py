"""Arithmetic that is exact where values are rational, in double precision otherwise, and never takes long.

Raises ArithmeticError (overflow, division by zero) or ValueError where there is no value, or none of a modest size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

Value = Fraction | complex

_MAX_BITS = 50_000  # of an exact value
_MAX_FACTORIAL, _MAX_CHOOSE = 2000, 20_000
_MAX_ROOT = 64


def calculate(function: Callable[[Any, Any], Value], a: Value, b: Value) -> Value:
    """The function of two values: both as rationals if they are, else both as complex numbers."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        value = function(a, b)
        if isinstance(value, Fraction) and _bits(value) > _MAX_BITS:
            raise OverflowError
        return value
    return function(complex(a), complex(b))


def power(a: Value, b: Value) -> Value:
    """Exact for whole exponents, and for rational ones where the root is rational."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        if b.denominator == 1:
            if abs(a) == 1:
                return a if b % 2 else abs(a)
            if _bits(a) * abs(b) > _MAX_BITS:
                raise OverflowError
            return a ** int(b)
        base = root(a, Fraction(b.denominator)) if a > 0 else None
        if isinstance(base, Fraction):
            return power(base, Fraction(b.numerator))
    return complex(a) ** complex(b)


def root(a: Value, index: Value) -> Value:
    """The real root where there is one; exact where it is rational."""
    if isinstance(a, Fraction) and isinstance(index, Fraction):
        n = int(index)
        if n == index and 0 < n <= _MAX_ROOT and (a >= 0 or n % 2):
            sign = -1 if a < 0 else 1
            top, bottom = _whole_root(abs(a.numerator), n), _whole_root(a.denominator, n)
            if top is not None and bottom is not None:
                return Fraction(sign * top, bottom)
            return sign * complex(abs(a)) ** (1 / n)
    return complex(a) ** (1 / complex(index))


def factorial(a: Value) -> Value:
    """n!, and the gamma function between whole numbers."""
    if not isinstance(a, Fraction):
        raise ValueError("factorial of an irrational number")
    if a.denominator > 1 or a < 0:
        return complex(math.gamma(a + 1))
    if a > _MAX_FACTORIAL:
        raise OverflowError
    return Fraction(math.factorial(int(a)))


def choose(n: Value, k: Value) -> Value:
    """Binomial coefficient, by gamma functions between whole numbers."""
    if not isinstance(n, Fraction) or not isinstance(k, Fraction):
        raise ValueError("binomial coefficient of irrational numbers")
    if n.denominator > 1 or k.denominator > 1 or n < 0 or k < 0:
        return complex(math.gamma(n + 1) / (math.gamma(k + 1) * math.gamma(n - k + 1)))
    if n > _MAX_CHOOSE:
        raise OverflowError
    return Fraction(math.comb(int(n), int(k)))


def floor(a: Value) -> Value:
    return Fraction(math.floor(a if isinstance(a, Fraction) else a.real))


def ceiling(a: Value) -> Value:
    return Fraction(math.ceil(a if isinstance(a, Fraction) else a.real))


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _whole_root(a: int, n: int) -> int | None:
    """The n-th root of a whole number, None when it is no whole number (or too long to say)."""
    found = math.isqrt(a) if n == 2 else round(a ** (1 / n)) if a.bit_length() < 1000 else 0
    return found if found**n == a else None
