# ruff: noqa: RUF001  (mathematical characters are what this is about)
"""The shape of a normalized answer: lists, brackets, intervals, relations and names, as pieces of text."""

from __future__ import annotations

import re
from typing import NamedTuple

from valor.rewards.mathematics.expressions import read_expression

_OPENING, _CLOSING = "([{⦃⟦“", ")]}⦄⟧”"
_CONJUNCTION = re.compile(r",? ?(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]) ?|,? ?“(?:and|or)” ?")
_RELATION = re.compile(r"[=<>≤≥≠≈]|\\(?:approx|equiv)(?![A-Za-z])")
_FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}
# k ∈ ℤ beside an answer says what k stands for
_DOMAIN = re.compile(
    r"(?:“?where”? ?)?[a-z](?:, ?[a-z])* ?∈ ?(?:ℝ|\\mathbb ?\{?[ZNQRC]\}?|[ZNQRC])[\^_+*{}\w ]*|“for .*”"
)
_SET_BUILDER = re.compile(r"⦃ ?(?:[A-Za-z]|\\[a-z]+) ?(?:∈ ?ℝ ?)?[|:] ?(.+)⦄")
_MEMBER = re.compile(r"(?:[A-Za-z](?:_\{?\w\}?)?|\\[a-z]+) ?∈ ?(.+)")
_OPEN_SYSTEM = re.compile(r"^⦃ ?(?=⟦[^⟧]*⟧$)")  # one brace around a system of equations
_NAME = re.compile(
    r"(?:[A-Za-z]|\\(?:angle|triangle) ?(?:[A-Z](?:_\{?\d\}?)? ?)+|\\[A-Za-z]+|[A-Z]{2,4}|[A-Z]?“[^”]*”|\|[A-Za-z]+\|)"
    r"'?(?:_ ?(?:\{[^{}]*\}|\w))?(?:\([A-Za-z0-9, ]{1,8}\))?"
)
_OF_A_NAME = re.compile(r"\\(?:sin|cos|tan|cot|angle|log|ln) ?\(?[A-Z]+\)?")
_PLAIN_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:and|mod)\b)[A-Za-z]{3,}")
_HOLDS_WHERE = re.compile(r".*[<>≤≥≠].*|[(\[].*,.*[)\]]")  # a relation, also one that has become an interval
INFINITY = r"\infty"
_REALS = rf"(-{INFINITY},{INFINITY})"


class Bracketed(NamedTuple):
    """Items in order between brackets; no brackets for a bare list."""

    left: str
    items: list[str]
    right: str

    @property
    def brackets(self) -> str:
        return self.left + self.right


def split(text: str, separators: str) -> list[str]:
    """Parts between separators outside of all brackets; where a comma separates, `and` and `or` do too."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        c = text[i]
        word = _CONJUNCTION.match(text, i) if depth == 0 and c in ", “ao" and "," in separators else None
        if word or (depth == 0 and c in separators):
            parts.append(text[start:i].strip())
            i = start = word.end() if word else i + 1
            continue
        depth = max(depth + (c in _OPENING) - (c in _CLOSING), 0)
        i += 1
    return [part for part in [*parts, text[start:].strip()] if part]


def collection(text: str) -> Bracketed:
    """The items of a set, tuple, interval, matrix, union or bare list; one item for anything else."""
    text = _OPEN_SYSTEM.sub("", text)
    parts = split(text, "∪")
    if len(parts) == 1:
        parts = [part for part in split(text, ",;") if not _DOMAIN.fullmatch(part)] or [text]
    parts = [sign for part in parts for sign in _signs(part)]
    if len(parts) == 1 and parts[0][0] in "([⦃⟦{" and _is_enclosed(parts[0]):
        return _inside(parts[0])
    spans = [interval(part) for part in parts]
    holes = [hole[1] for hole in (re.fullmatch(r"[^≠]+≠(.+)", part) for part in parts) if hole]
    if holes and len(parts) - len(holes) == sum(map(bool, spans)) <= 1:  # k < 1 and k ≠ 0
        span = next(filter(None, spans), _REALS)
        low, high = split(span[1:-1], ",")
        edges = [span[0] + low, *[f"{hole})|({hole}" for hole in holes], high + span[-1]]
        return Bracketed("", ",".join(edges).split("|"), "")
    return Bracketed("", [span or part for span, part in zip(spans, parts, strict=True)], "")


def without_conditions(found: Bracketed) -> Bracketed:
    """Without items that only say where the others hold: `ln x, x > 0`, `1/x, x ≠ 0`."""
    if found.left or _HOLDS_WHERE.fullmatch(found.items[0]):
        return found
    return found._replace(items=[item for item in found.items if not _HOLDS_WHERE.fullmatch(item)])


def membership(text: str) -> str:
    """What follows `x ∈`, or the condition in `⦃x | …⦄`; else the text."""
    built, member = _SET_BUILDER.fullmatch(text), _MEMBER.fullmatch(text)
    if built:
        return built[1].strip()
    if text == "ℝ":
        return _REALS
    return membership(member[1].strip()) if member else text


def without_names(text: str) -> str:
    """`(x,y)=(1,2)` as `(1,2)`."""
    named = re.fullmatch(r"(\([^()=]*\)) ?= ?(\(.*\))", text)
    return named[2] if named and is_name(named[1]) else text


def equation(text: str) -> tuple[str, str]:
    """First and last side of a chain of equalities, the name first; "" and the text when there is none."""
    signs = _relations(text)
    if not signs or any(sign[0] in "<>≤≥≠" for sign in signs):
        return "", text
    left, right = text[: signs[0].start()].strip(), text[signs[-1].end() :].strip()
    if is_name(right) and not is_name(left):
        left, right = right, left
    return (left, right) if left and right else ("", text)


def inequality(text: str) -> tuple[bool, str] | None:
    """Whether it is strict, and the larger side minus the smaller, of a text that is one inequality."""
    signs = _relations(text)
    if len(signs) != 1 or signs[0][0] not in _FLIPPED:
        return None
    sides = text[: signs[0].start()], text[signs[0].end() :]
    large, small = sides if signs[0][0] in ">≥" else sides[::-1]
    return signs[0][0] in "<>", f"({large})-({small})"


def interval(text: str) -> str | None:
    r"""`a < x ≤ b` as `(a,b]`, `x > a` as `(a,\infty)`; None for anything else."""
    signs = _relations(text)
    if not 1 <= len(signs) <= 2 or any(sign[0] not in _FLIPPED for sign in signs):
        return None
    edges = [0, *[edge for sign in signs for edge in sign.span()], len(text)]
    sides = [text[a:b].strip() for a, b in zip(edges[::2], edges[1::2], strict=True)]
    operators = [sign[0] for sign in signs]
    if len(sides) == 3:
        if operators[0] in ">≥":
            sides, operators = sides[::-1], [_FLIPPED[o] for o in operators[::-1]]
        if not is_name(sides[1]) or any(o in ">≥" for o in operators):
            return None
        return f"{'(' if operators[0] == '<' else '['}{sides[0]},{sides[2]}{')' if operators[1] == '<' else ']'}"
    (left, right), (operator,) = sides, operators
    if is_name(right) and not is_name(left):
        left, right, operator = right, left, _FLIPPED[operator]
    if not is_name(left) or is_name(right):
        return None
    if operator in "<≤":
        return f"(-{INFINITY},{right}{')' if operator == '<' else ']'}"
    return f"{'(' if operator == '>' else '['}{right},{INFINITY})"


def labels(items: list[str]) -> bool:
    """Whether the items are values of different names: then each has its place."""
    names = [equation(item)[0].partition("_")[0] for item in items]  # x_1 and x_2 are two values of x
    return all(names) and len(set(names)) == len(names) > 1


def is_name(text: str) -> bool:
    """Whether a value is given this name: a variable, f(x), an angle, words, or a tuple of such."""
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        return all(_NAME.fullmatch(part) for part in split(text[1:-1], ","))
    if text == INFINITY:
        return False
    return bool(_NAME.fullmatch(text)) or (has_words(text) and not re.search(r"[\d+*/^]", text))


def names_a_value(text: str) -> bool:
    """Whether what is equal to this is an answer: a name's value, or that of a calculation without unknowns."""
    expression = read_expression(text)
    return is_name(text) or bool(_OF_A_NAME.fullmatch(text)) or (expression is not None and not expression.variables)


def has_words(text: str) -> bool:
    """Whether there is quoted text, or a word of three letters or more that is no command."""
    return "“" in text or bool(_PLAIN_WORD.search(text))


def _inside(text: str) -> Bracketed:
    left, inside, right = text[0], text[1:-1].strip(), text[-1]
    items = [item[1:-1] if item[0] == "{" and _is_enclosed(item) else item for item in split(inside, ",;")]
    if len(items) == 1 and left in "([{":
        return collection(inside)
    rows = split(inside, ";") if left == "⟦" else []
    if 1 < len(rows) < len(items):
        items = [f"⟦{row}⟧" for row in rows]
    left, right = ("⦃", "⦄") if left == "{" else (left, right)
    return Bracketed(left, [sign for item in items for sign in _signs(item)], right)


def _signs(text: str) -> list[str]:
    r"""Both readings of a `\pm`."""
    return [text.replace(r"\pm", sign) for sign in "+-"] if text.count(r"\pm") == 1 else [text]


def _relations(text: str) -> list[re.Match[str]]:
    """Relation signs outside of all brackets."""
    found, depth, position = [], 0, 0
    for sign in _RELATION.finditer(text):
        for c in text[position : sign.start()]:
            depth += (c in _OPENING) - (c in _CLOSING)
        position = sign.start()
        if depth == 0:
            found.append(sign)
    return found


def _is_enclosed(text: str) -> bool:
    """Whether the bracket that the text starts with is closed at its end."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c in _OPENING) - (c in _CLOSING)
        if depth == 0:
            return 0 < i == len(text) - 1
    return False
