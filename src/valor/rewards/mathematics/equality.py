# ruff: noqa: RUF001  (mathematical characters are what this is about)
"""Whether an answer means the ground truth: words, quantities, lists, intervals, relations and formulas."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

from valor.rewards.mathematics.expressions import Value, constant, proportional, read_expression, same_expression
from valor.rewards.mathematics.notation import normalize, without_thousands_commas
from valor.rewards.mathematics.quantities import Quantity, read_quantity, same_quantity
from valor.rewards.mathematics.structure import (
    INFINITY,
    Bracketed,
    collection,
    equation,
    has_words,
    inequality,
    interval,
    is_name,
    labels,
    membership,
    names_a_value,
    split,
    without_conditions,
    without_names,
)

_MAX_ITEMS = 30
_MAX_WORDS = 4  # more of them are a sentence, where nothing is to be calculated
_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOSEN = re.compile(r"(?:option |choice )?[(\[]?([A-J])(?:[)\].:,](?!\w)|$| [-:] )", re.IGNORECASE)
_LABELLED = re.compile(r"([A-J])\s*[:.)]\s*(\S.*)")
_BASED = re.compile(r"\(?([0-9A-F]+)\)?_ ?\{?(?:“base ?)?(\d+)”?\}?")
_CONDITION = re.compile(r"^“[^”]*” ?(?=[-\d\\(])| ?\(?“[^”]*”(?:\^\{?\d\}?)?\)?$| ?\([^()]*[<>≤≥∈≠][^()]*\)$")
_COMPUTED = re.compile(r"\\(?:int|sum|prod|lim|det|gcd|lcm|max|min|begin|operatorname)")  # algebra may evaluate it
_NO_VARIABLE = re.compile(r"“[^”]*”|\\(?:frac|sqrt|pi|infty)(?![a-z])")
_INTERVALS = {"()", "[]", "(]", "[)"}
_NOTHING = re.compile(r"\\ ?emptyset|empty set|no(?: real)? solutions?|none|does not exist|dne")
_ARTICLES = frozenset(("the", "a", "an"))


def equal(truth: str, answer: str) -> bool | None:
    """Whether the answer means the ground truth, both as written. None when this module cannot read one of them."""
    pair = normalize(truth), normalize(answer)
    joined = without_thousands_commas(pair[0]), without_thousands_commas(pair[1])
    verdict = _same(*joined)
    if verdict is not True and joined != pair:
        return _same(*pair) or verdict  # 1,234 may also be a list
    return verdict


def _same(truth: str, answer: str) -> bool | None:
    truth, answer = truth.strip(), answer.strip()
    if not truth or not answer:
        return False
    if truth.replace(" ", "") == answer.replace(" ", ""):
        return True
    for compare in (_as_choices, _as_based, _as_quantities, _as_words, _as_relations, _as_ratios, _as_collections):
        verdict = compare(truth, answer)
        if verdict is not None:
            return verdict
    return _as_expressions(truth, answer)


def _as_choices(truth: str, answer: str) -> bool | None:
    choice, labelled = _CHOICE.fullmatch(truth), _LABELLED.fullmatch(truth)
    if choice:
        chosen = _CHOSEN.match(answer.strip("“” "))
        return True if chosen and chosen[1].upper() == choice[1] else None
    chosen = _LABELLED.fullmatch(answer.lstrip("("))
    if chosen and not choice and _same(truth, chosen[2]):  # "(B) 12" for 12
        return True
    if labelled and not re.search(r"\b[A-J]\s*:", labelled[2]):  # "B: -1" in data made of multiple choice
        return bool(_same(labelled[1], answer) or _same(labelled[2], answer))
    return None


def _as_based(truth: str, answer: str) -> bool | None:
    """Numbers written with their base, 2516_8: the base may be missing on one side."""
    a, b = _BASED.fullmatch(truth), _BASED.fullmatch(answer)
    if not a and not b:
        return None
    digits, base = (a[1], a[2]) if a else (truth, None)
    other, other_base = (b[1], b[2]) if b else (answer, None)
    return digits == other and (base == other_base or None in (base, other_base))


def _as_quantities(truth: str, answer: str) -> bool | None:
    a, b = read_quantity(truth), read_quantity(answer)
    return same_quantity(a, b) if a and b else None


def _as_words(truth: str, answer: str) -> bool | None:
    if not (has_words(truth) or _is_empty([truth])) or split(truth, ",;") != [truth] or read_quantity(truth):
        return None
    words, other = _words(truth), _words(answer)
    if words == other or (_is_empty(words) and _is_empty(other)):
        return True
    if len(words) == 1 and words[0] in ("yes", "no", "true", "false"):
        return other[:1] == words
    formula = re.search(r"[\\=<>]", truth) or (re.search(r"\d", truth) and len(words) <= _MAX_WORDS)
    return None if formula else False


def _as_relations(truth: str, answer: str) -> bool | None:
    """Assignments, equations and inequalities against each other, or against a value or an interval."""
    plain = without_names(membership(truth)), without_names(membership(answer))
    if plain != (truth, answer):
        return _same(*plain)
    if any(len(split(text, ",;∪")) > 1 for text in plain):
        return None
    (left, right), (other_left, other_right) = equation(truth), equation(answer)
    if left and other_left:
        names = {left.replace(" ", ""), other_left.replace(" ", "")}
        if len(names) == 1 or names == {"y", "f(x)"}:
            return _same(right, other_right)
        if is_name(left) and is_name(other_left):
            return _same(left, other_right) is True and _same(right, other_left)
        return _same_zeros(f"({left})-({right})", f"({other_left})-({other_right})")
    if left or other_left:
        return _same(right, other_right) if names_a_value(left or other_left) else False
    bounds, other_bounds = interval(truth), interval(answer)
    if bounds or other_bounds:
        return _same(bounds or truth, other_bounds or answer)
    first, second = inequality(truth), inequality(answer)
    if first is None or second is None:
        return None
    return first[0] == second[0] and _same_zeros(first[1], second[1], positive=True)


def _same_zeros(truth: str, answer: str, positive: bool = False) -> bool | None:
    """Whether one difference of two sides is a constant times the other. If not, equations may still be the same."""
    first, second = read_expression(truth), read_expression(answer)
    if first is None or second is None:
        return None
    if first.variables != second.variables:
        return False
    return True if proportional(first, second, positive) else False if positive else None


def _as_ratios(truth: str, answer: str) -> bool | None:
    """a:b:c up to a common factor; a:b may also be a fraction."""
    first, second = split(truth, ":"), split(answer, ":")
    if len(first) == len(second) == 1 or (max(len(first), len(second)) > 2 and len(first) != len(second)):
        return None
    first, second = ([*parts, "1"] if len(parts) == 1 else parts for parts in (first, second))
    products = ((f"({a})*({second[0]})", f"({b})*({first[0]})") for a, b in zip(first, second, strict=True))
    return _all(_as_expressions(a, b) for a, b in products)


def _as_collections(truth: str, answer: str) -> bool | None:
    truths, answers = collection(truth), collection(answer)
    if len(truths.items) == len(answers.items) == 1 and not truths.left and not answers.left:
        return None
    if len(truths.items) != len(answers.items):
        truths, answers = without_conditions(truths), without_conditions(answers)
        if len(truths.items) == len(answers.items) == 1:
            return _same(truths.items[0], answers.items[0])
    if len(truths.items) != len(answers.items) or len(truths.items) > _MAX_ITEMS:
        return False
    kinds = {truths.brackets, answers.brackets}
    if len(truths.items) == 2 and len(kinds) == 2 and kinds <= _INTERVALS:
        if _open_at_infinity(truths).brackets != _open_at_infinity(answers).brackets:
            return False
    elif "⦃⦄" in kinds and kinds & _INTERVALS:
        return False
    if kinds <= {"", "⦃⦄"} and labels(truths.items) == labels(answers.items):
        return _match_unordered(truths.items, answers.items)
    return _all(_same(a, b) for a, b in zip(truths.items, answers.items, strict=True))


def _as_expressions(truth: str, answer: str) -> bool | None:
    if {truth.lstrip("+-"), answer.lstrip("+-")} & {INFINITY}:
        return truth.lstrip("+") == answer.lstrip("+")
    texts = [_CONDITION.sub("", text).strip() or text for text in (truth, answer)]
    if texts != [truth, answer]:
        return _same(*texts)
    a, b = read_expression(truth), read_expression(answer)
    verdict = same_expression(a, b) if a and b else None
    if verdict is not True:  # a decimal may stand for an irrational number
        quantities = [
            read_quantity(t) or (_as_quantity(constant(e)) if e else None) for t, e in ((truth, a), (answer, b))
        ]
        if quantities[0] and quantities[1]:
            return same_quantity(quantities[0], quantities[1])
    if a and b:
        return verdict
    return None if _COMPUTED.search(truth + answer) or _variables(truth) == _variables(answer) != set() else False


def _as_quantity(value: Value | None) -> Quantity | None:
    if value is None or isinstance(value, Fraction):
        return None if value is None else Quantity(value)
    return Quantity(Fraction(value.real)) if abs(value.imag) <= 1e-12 * abs(value) else None


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    found = list(verdicts)
    return False if False in found else None if None in found else True


def _match_unordered(truths: list[str], answers: list[str]) -> bool | None:
    """Whether each ground truth has an answer of its own."""
    left, unknown = list(answers), False
    for truth in truths:
        verdicts = [_same(truth, answer) for answer in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            unknown = True
        else:
            return False
    return None if unknown else True


def _open_at_infinity(interval: Bracketed) -> Bracketed:
    low, high = interval.items
    left, right = "(" if INFINITY in low else interval.left, ")" if INFINITY in high else interval.right
    return Bracketed(left, interval.items, right)


def _variables(text: str) -> set[str]:
    """Those of a formula that could not be read, without regard to case."""
    return set(re.findall(r"[a-z]|\\[a-z]{2,}", _NO_VARIABLE.sub(" ", text.lower())))


def _is_empty(words: list[str]) -> bool:
    """Whether the answer is that there is nothing."""
    return bool(_NOTHING.fullmatch(" ".join(words)))


def _words(text: str) -> list[str]:
    found = re.findall(r"\w+|[^\w\s“”.,;:!?'()-]", text.lower())
    return [word for word in found if word not in _ARTICLES]
