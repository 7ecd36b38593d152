"""LaTeX and plain formulas of school algebra, read into functions of their variables."""

from __future__ import annotations

import cmath
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from valor.rewards.mathematics import values
from valor.rewards.mathematics.values import Value

Node = Callable[[Mapping[str, Value]], Value]


class Unreadable(Exception):
    """Not a formula of the kind this module knows."""


_MAX_DEPTH, _MAX_DIGITS = 40, 1000
_GREEK = frozenset((
    "alpha", "beta", "gamma", "delta", "varepsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu",
    "xi", "rho", "sigma", "tau", "upsilon", "varphi", "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda",
    "Xi", "Sigma", "Phi", "Psi", "Omega", "ell", "vartheta",
))  # fmt: skip
_TRIGONOMETRIC: dict[str, Callable[[complex], complex]] = {
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "cot": lambda x: 1 / cmath.tan(x),
    "sec": lambda x: 1 / cmath.cos(x), "csc": lambda x: 1 / cmath.sin(x),
}  # fmt: skip
_INVERSE: dict[str, Callable[[complex], complex]] = {
    "sin": cmath.asin, "cos": cmath.acos, "tan": cmath.atan, "cot": lambda x: cmath.atan(1 / x),
    "sec": lambda x: cmath.acos(1 / x), "csc": lambda x: cmath.asin(1 / x), "sinh": cmath.asinh, "cosh": cmath.acosh,
    "tanh": cmath.atanh,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    **_TRIGONOMETRIC,
    **{f"arc{name}": function for name, function in _INVERSE.items()},
    "sinh": cmath.sinh, "cosh": cmath.cosh, "tanh": cmath.tanh,
    "ln": cmath.log, "log": cmath.log, "lg": cmath.log10, "exp": cmath.exp,
}  # fmt: skip
_STARTS = _GREEK | _FUNCTIONS.keys() | {"frac", "sqrt", "binom", "pi", "lfloor", "lceil"}  # of a factor
_CONSTANTS: dict[str, Value] = {"e": math.e, "i": 1j}
_NUMBER = re.compile(r"\d+(?:\.\d*)?|\.\d+")
_NAME = re.compile(r"\\([A-Za-z]+) ?")
_APPLIED = re.compile(r"\( ?\d+ ?\)")
_WORD = re.compile(r"[A-Za-z]{4,}")


class Reader:
    """Recursive descent over the characters. Each method reads one kind of thing and returns its value's function."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0
        self.variables: set[str] = set()
        self.degrees = False
        self._depth = self._bars = 0

    def peek(self) -> str:
        """The next character that is no space, "" at the end."""
        while self.text.startswith(" ", self.position):
            self.position += 1
        return self.text[self.position : self.position + 1]

    def take(self, expected: str) -> bool:
        if self.peek() and self.text.startswith(expected, self.position):
            self.position += len(expected)
            return True
        return False

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self.peek()
        found = pattern.match(self.text, self.position)
        if found:
            self.position = found.end()
        return found

    def sum(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Unreadable
        total = self._signed()
        while self.peek() in ("+", "-"):
            total = _binary(operator.add, total, self._signed())
        self._depth -= 1
        return total

    def _signed(self) -> Node:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.text[self.position] == "-"
            self.position += 1
        term = self._product()
        return _negative(term) if negative else term

    def _product(self) -> Node:
        product = self._power()
        while True:
            if self.take("*"):
                product = _binary(operator.mul, product, self._sign_then_power())
            elif self.take("/"):
                product = _binary(operator.truediv, product, self._sign_then_power())
            elif self._starts_factor():
                product = _binary(operator.mul, product, self._power())
            else:
                return product

    def _sign_then_power(self) -> Node:
        return _negative(self._power()) if self.take("-") else self._power()

    def _starts_factor(self) -> bool:
        c = self.peek()
        if c == "|":
            return not self._bars
        if c == "\\":
            name = _NAME.match(self.text, self.position)
            return bool(name) and name[1] in _STARTS
        return c.isalpha() or c in ("(", "{", "[") if c else False

    def _power(self) -> Node:
        base = self._atom()
        while True:
            if self.take("^"):
                base = _binary(values.power, base, self._exponent())
            elif self.take("!"):
                base = _unary(values.factorial, base)
            elif self.take("°"):
                self.degrees = True
            else:
                return base

    def _exponent(self) -> Node:
        if self.take("{"):
            return self._closed("}")
        if self.take("-"):
            return _negative(self._exponent())
        return self._atom()

    def _argument(self) -> Node:
        """Of `\\frac`: a group, or one digit, letter or command."""
        if self.take("{"):
            return self._closed("}")
        digit = self.match(re.compile(r"\d"))
        return _number(int(digit[0])) if digit else self._atom()

    def _closed(self, bracket: str) -> Node:
        inside = self.sum()
        if not self.take(bracket):
            raise Unreadable
        return inside

    def _atom(self) -> Node:
        c = self.peek()
        number = self.match(_NUMBER)
        if number:
            return self._numeral(number[0])
        for left, right in (("(", ")"), ("{", "}"), ("[", "]")):
            if self.take(left):
                return self._closed(right)
        if self.take("|"):
            self._bars += 1
            inside = self._closed("|")
            self._bars -= 1
            return _unary(abs, inside)
        name = self.match(_NAME)
        if name:
            return self._command(name[1])
        if not c.isascii() or not c.isalpha() or _WORD.match(self.text, self.position):
            raise Unreadable
        self.position += 1
        return self._variable(c)

    def _numeral(self, digits: str) -> Node:
        if self.text.startswith("_", self.position) or len(digits) > _MAX_DIGITS:
            raise Unreadable
        value = Fraction(digits.rstrip("."))
        start = self.position
        if "." not in digits and self.take("\\frac"):  # 2\frac{1}{2} is two and a half
            mixed = re.compile(r" ?\{ ?(\d+) ?\}\{ ?(\d+) ?\}").match(self.text, self.position)
            if mixed and 0 < int(mixed[1]) < int(mixed[2]):
                self.position = mixed.end()
                return _number(value + Fraction(int(mixed[1]), int(mixed[2])))
            self.position = start
        return _number(value)

    def _variable(self, name: str) -> Node:
        subscript = self.match(re.compile(r"_ ?(?:\{([^{}]*)\}|(\w))|'+"))
        if subscript:
            name += "_" + (subscript[1] or subscript[2] or subscript[0]).replace(" ", "")
        applied = self.match(_APPLIED)  # I(0) is a value of its own, not I times 0
        name += applied[0] if applied else ""
        if name in _CONSTANTS:
            value = _CONSTANTS[name]
            return lambda env: value
        self.variables.add(name)
        return lambda env: env[name]

    def _command(self, name: str) -> Node:
        if name == "pi":
            return lambda env: math.pi
        if name in _GREEK:
            return self._variable(f"\\{name}")
        if name == "frac":
            return _binary(operator.truediv, self._argument(), self._argument())
        if name == "binom":
            return _binary(values.choose, self._argument(), self._argument())
        if name == "sqrt":
            index = self._closed("]") if self.take("[") else _number(2)
            return _binary(values.root, self._exponent(), index)
        if name in ("lfloor", "lceil"):
            inside = self.sum()
            if not self.take(f"\\r{name[1:]}"):
                raise Unreadable
            return _unary(values.floor if name == "lfloor" else values.ceiling, inside)
        if name not in _FUNCTIONS:
            raise Unreadable
        return self._function(name)

    def _function(self, name: str) -> Node:
        function, power, base = _FUNCTIONS[name], None, None
        if self.take("^"):
            if name in _INVERSE and self.match(re.compile(r"\{ ?- ?1 ?\}|-1")):
                function = _INVERSE[name]
            else:
                power = self._exponent()
        if name == "log" and self.take("_"):
            base = self._argument()
        outside, self.degrees = self.degrees, False
        argument = self._function_argument()
        scale = math.pi / 180 if self.degrees and name in _TRIGONOMETRIC else 1
        self.degrees = outside or (self.degrees and name not in _TRIGONOMETRIC)
        value = _unary(lambda x: function(complex(x) * scale), argument)
        if base:
            value = _binary(operator.truediv, value, _unary(lambda x: cmath.log(complex(x)), base))
        return _binary(values.power, value, power) if power else value

    def _function_argument(self) -> Node:
        if self.peek() in ("(", "{", "["):
            return self._atom()
        argument = self._sign_then_power()
        while self._starts_factor() and self.peek() not in ("(", "["):
            name = _NAME.match(self.text, self.position)
            if name and name[1] in _FUNCTIONS:
                break
            argument = _binary(operator.mul, argument, self._power())
        return argument


def _number(value: Fraction | int) -> Node:
    exact = Fraction(value)
    return lambda env: exact


def _negative(a: Node) -> Node:
    return _binary(operator.mul, _number(-1), a)


def _unary(function: Callable[[Value], Value], a: Node) -> Node:
    return lambda env: function(a(env))


def _binary(function: Callable[[Any, Any], Value], a: Node, b: Node) -> Node:
    return lambda env: values.calculate(function, a(env), b(env))
