"""Equality by computer algebra: math-verify's parser and comparison; constants are compared to 400 digits.

Imported at first use: it takes most of a second and 60 MB.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from random import Random
from typing import Any

from latex2sympy2_extended.logic import And
from math_verify import LatexExtractionConfig, parse, verify
from math_verify.parser import extract_latex, parse_expr_cached, parse_latex_cached
from sympy import Basic, Eq, Expr, Float, I, Integral, Limit, Pow, Product, Rational, Sum, UnevaluatedExpr, Union, log
from sympy.core.cache import clear_cache
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from valor.rewards.quantities import FLOAT_DIGITS, Quantity, read_quantities

_DIGITS = 400  # at math-verify's 15, all numbers below 1e-15 are the same
_MODEST = 10**9999  # larger rational numbers are not written out
_LIBRARY_DIGITS = 15  # for integrals, sums and limits, which it may have to work out numerically
_DRAWS, _DRAWN_DIGITS = 24, 50  # points at which formulas are compared
_ANALYSIS = (Integral, Sum, Product, Limit)
_CONFIG = LatexExtractionConfig(boxed_match_priority=0)
# Without its units, or it would take the t of 2t for one.
_CONFIGS = [replace(_CONFIG, normalization_config=replace(_CONFIG.normalization_config, units=False))]
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|(?<![A-Za-z])[a-z]) ?\^\\circ ?")
_ANGLES = re.compile(r"\\(?:pi|(?:arc)?(?:sin|cos|tan|cot|sec|csc))(?![a-z])")
_MOST_PARTS = 4  # of an answer with "or", compared in any order
_OR = re.compile(r" (?:\\text ?\{ ?)?or(?: ?\})? ")
_DEFINED = re.compile(r"^[^=]{1,12}= ?(?=\\\{\()")  # the name of a function that is defined case by case
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off


def same(truth: str, answer: str) -> bool:
    """Whether two formulas in LaTeX are equal, without a time limit."""
    if not (_DEFINED.match(truth) and _DEFINED.match(answer)):
        truth, answer = _DEFINED.sub("", truth), _DEFINED.sub("", answer)
    if all(r"\pm" in text for text in (truth, answer)):
        (upper, lower), others = _signs(truth), _signs(answer)
        return any(same(upper, one) and same(lower, other) for one, other in (others, others[::-1]))
    (parts, others) = (_OR.split(text) for text in (truth, answer))
    if 1 < len(parts) == len(others) <= _MOST_PARTS and any(
        all(same(*pair) for pair in zip(parts, order, strict=True)) for order in permutations(others)
    ):
        return True
    in_radians = [_DEGREES.sub(r"\\frac{\1\\pi}{180}", text) for text in (truth, answer)]
    if in_radians != [truth, answer] and _ANGLES.search(truth + answer) and same(*in_radians):
        return True
    gold, pred = _parsed(truth), _parsed(answer)
    first, second = _constant(gold), _constant(pred)
    verdict = _same_constant(first, second) if first is not None and second is not None else None
    if verdict is not None:
        return verdict
    numbers, decimals = read_quantities(truth), read_quantities(answer)
    places = numbers[0].rounding if len(numbers) == 1 else None
    if first is not None and not numbers and len(decimals) == 1 and decimals[0].places is not None:
        return _same_decimal(first, decimals[0])
    is_analysis = any(isinstance(part, Basic) and part.has(*_ANALYSIS) for part in [*gold, *pred])
    is_equal = verify(
        gold,
        pred,
        float_rounding=FLOAT_DIGITS if places is None else places,
        numeric_precision=_LIBRARY_DIGITS if is_analysis else _DIGITS,
        allow_set_relation_comp=True,
        timeout_seconds=None,
    )
    return is_equal or (bool(gold and pred) and _same_where_real(gold[0], pred[0]))


def _same_where_real(first: Any, second: Any) -> bool:
    """Whether formulas with roots or logarithms of the same letters, or equations for the same one, are equal wherever
    both are real: \\sqrt{1/n} and 1/\\sqrt{n}, which differ by a sign at complex n."""
    if isinstance(first, Eq) and isinstance(second, Eq) and first.lhs == second.lhs:
        first, second = first.rhs, second.rhs
    formulas = [formula for formula in (first, second) if isinstance(formula, Expr) and formula.free_symbols]
    if len(formulas) < 2 or first.free_symbols != second.free_symbols or first.has(*_ANALYSIS):
        return False
    bases = [base for formula in formulas for base in _real_bases(formula)]
    draws, agreements = Random(0), 0
    for number in range(_DRAWS if bases else 0):
        least = 1 if number % 2 else -90  # every other point is positive, where formulas of many letters are real
        point = [(letter, Rational(draws.randint(least, 90), 7)) for letter in sorted(first.free_symbols, key=str)]
        if not all(base.subs(point).is_positive for base in bases):
            continue
        a, b = (formula.subs(point).evalf(_DRAWN_DIGITS) for formula in formulas)
        if a.is_finite and b.is_finite:
            if abs(a - b) > abs(a) * Rational(10) ** (10 - _DRAWN_DIGITS):
                return False
            agreements += 1
    return agreements >= _DRAWS // 4


def _real_bases(formula: Expr) -> list[Expr]:
    """What has to be positive for a formula to be real: under roots and in logarithms, where it has letters."""
    roots = [x.base for x in formula.atoms(Pow) if not x.exp.is_integer]
    return [base for base in [*roots, *(x.args[0] for x in formula.atoms(log))] if base.free_symbols]


def _signs(text: str) -> tuple[str, str]:
    """With the upper signs of \\pm and \\mp, and with the lower ones."""
    upper = re.sub(r"\\mp(?![a-z])", "-", re.sub(r"\\pm(?![a-z])", "+", text))
    return upper, re.sub(r"\\mp(?![a-z])", "+", re.sub(r"\\pm(?![a-z])", "-", text))


def _parsed(text: str) -> list[Any]:
    """What math-verify reads; inequalities with "or" between them are the union of their sets."""
    parts = _OR.split(text)
    if len(parts) > 1 and all(re.search(r"[<>]|\\[lg]eq?(?:slant)?\b|\\neq?\b", part) for part in parts):
        relations = [relation for part in parts for relation in _parsed(part)[:1]]
        if len(relations) == len(parts) and all(
            isinstance(relation, Relational | And) and len(relation.free_symbols) == 1 for relation in relations
        ):
            return [Union(*(relation.as_set() for relation in relations))]
    return parse(f"\\boxed{{{text}}}", _CONFIGS, parsing_timeout=None)  # type: ignore[arg-type]


def forget() -> None:
    """Clear the caches: a computation that was cut off leaves half-made facts in them."""
    for cached in (extract_latex, parse_expr_cached, parse_latex_cached):
        cached.cache_clear()
    clear_cache()


def _constant(parsed: Sequence[Any]) -> Expr | None:
    """The number that was parsed; None for what has letters, is no number or would have to be worked out."""
    value = parsed[0] if parsed else None
    if isinstance(value, Expr) and [*map(str, value.free_symbols)] == ["i"]:
        value = value.subs(next(iter(value.free_symbols)), I)
    if not isinstance(value, Expr) or value.is_Matrix or value.free_symbols or value.has(AppliedUndef, *_ANALYSIS):
        return None
    return None if value.has(UnevaluatedExpr(Rational(1, 100))) else value  # a percentage may mean two numbers


def _same_constant(first: Expr, second: Expr) -> bool | None:
    """Whether two constants are equal, rational ones exactly and others to 400 digits; None when one is a decimal or
    was not computed so exactly."""
    if first.has(Float) or second.has(Float):
        return None
    near, other = first.evalf(_DIGITS), second.evalf(_DIGITS)
    exact = all(part._prec > 1 for value in (near, other) for part in value.atoms(Float))
    if not exact or not (near.is_finite and other.is_finite and near.is_number and other.is_number):
        return None
    is_near = abs(near - other) <= abs(near) * Rational(10) ** (10 - _DIGITS)
    if is_near not in (True, False):  # 7 mod 4, which is not worked out
        return None
    if not is_near:
        return False
    is_exact = first.is_rational and second.is_rational and abs(near) < _MODEST
    return bool(first.doit() == second.doit()) if is_exact else True


def _same_decimal(value: Expr, decimal: Quantity) -> bool:
    """Whether a constant is the decimal, or was calculated with floats to give it."""
    exact = value.evalf(_DIGITS)
    digits = FLOAT_DIGITS if decimal.digits >= FLOAT_DIGITS else _DIGITS - 10
    return bool(abs(exact - Rational(decimal.value)) <= abs(exact) * Rational(10) ** -digits)
