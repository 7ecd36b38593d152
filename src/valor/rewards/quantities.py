"""Numbers in LaTeX with a unit or a percent sign: their exact value, and when two of them mean the same."""

import re
from fractions import Fraction
from typing import NamedTuple

from valor.rewards.numerals import with_digits

FLOAT_DIGITS = 9  # a decimal with so many right digits was calculated with floats, and stands for the exact value
CONJUNCTION = re.compile(r",? ?(?:\\text ?\{ ?(?:and|or) ?\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])) ?|;")
_SURE_DIGITS, _SURE_PLACES, _MAX_DIGITS = 3, 2, 400  # a decimal ground truth with fewer than sure is taken as exact
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_UNSIGNED = r"\d+(?:\.\d*)?|\.\d+"
_MIXED = re.compile(r"(?:(\d+) ?)?\\frac ?\{(-?\d+)\}\{(\d+)\}")
_QUANTITY = re.compile(
    rf"(?P<sign>[-+]?) ?\$? ?(?P<inner>-?)(?:(?P<whole>\d+) (?=\d+/))?(?P<number>{_UNSIGNED}|\({_UNSIGNED}\))"
    rf"(?: ?\\(?:times|cdot) ?10 ?\^ ?\{{?(?P<power>[-+]?\d+)\}}?)?(?: ?[/:] ?(?P<bottom>{_UNSIGNED}))?(?P<rest>\D.*)?"
)
_UNITS = re.compile(
    r" ?(?P<percent>\\?%)?(?:\^\\circ)? ?"
    r"(?P<words>(?:(?:\\text ?\{[^{}]*\}|(?<= )[NVJWCFLmghs]\b|[A-Za-z]{2,}(?![A-Za-z]))[ ./]*)*)"
    r"(?P<power>\^ ?\{?\d\}?)?"
)
_NO_UNIT = frozenset(("and", "or", "for", "plus", "minus", "times", "not", "mod", "half", "third", "thirds", "where"))
_SCALE = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9}
_SYNONYMS = {"sq": "square", "metre": "meter", "litre": "liter", "lb": "pound", "sec": "second", "min": "minute"}


class Quantity(NamedTuple):
    """A number as written: `places` decimal places (None: written exactly), `digits` significant ones, and its unit."""

    value: Fraction
    places: int | None = None
    digits: int = 0
    percent: bool = False
    unit: str = ""

    @property
    def rounding(self) -> int | None:
        """The decimal places that a ground truth may have been rounded to, None when it is taken as exact."""
        sure = self.places is not None and (self.digits >= _SURE_DIGITS or self.places >= _SURE_PLACES)
        return self.places if sure else None


def read_quantities(text: str) -> list[Quantity]:
    """The numbers of a list, one for a number alone; none for anything else."""
    parts = CONJUNCTION.sub(",", _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)).split(",")
    found = [read_quantity(part.strip()) for part in parts]
    return [quantity for quantity in found if quantity] if all(found) else []


def read_quantity(text: str) -> Quantity | None:
    """A text that is one number, fraction, mixed number or ratio, with a unit perhaps."""
    if text[:1].isalpha() or text.startswith("\\text"):  # five, \text{thirty-six apples}
        text = re.sub(r"^\\text ?\{ ?(\d[^{}]*)\}", r"\1", with_digits(text))
    text = _MIXED.sub(lambda m: f"{m[1] + ' ' if m[1] else ''}{m[2]}/{m[3]}", text)
    found = _QUANTITY.fullmatch(re.sub(r"^([-+]?)10 ?(?=\^)", r"\g<1>1 \\times 10", text))
    units = _UNITS.fullmatch(found["rest"] or "") if found and len(text) <= _MAX_DIGITS else None
    if not found or not units:
        return None
    power, number = int(found["power"] or 0), found["number"].strip("()")
    bottom = Fraction(found["bottom"] or 1)
    words = re.sub(r"\\text|[{}.\\]", " ", units["words"].lower()).split()
    if abs(power) > _MAX_DIGITS or not bottom or _NO_UNIT & set(words):
        return None
    value = (Fraction(number) * Fraction(10) ** power / bottom) + int(found["whole"] or 0)
    places = None
    if found["bottom"] is None and ("." in number or power):
        places = len(number.partition(".")[2]) - power
    if (found["sign"] == "-") != (found["inner"] == "-"):
        value = -value
    for word in words:
        value *= Fraction(10) ** _SCALE.get(word, 0)
    unit = " ".join(_SYNONYMS.get(word, word) for word in words) + (units["power"] or "").translate({123: "", 125: ""})
    percent = bool(units["percent"]) or bool({"percent", "percentage"} & set(words))
    return Quantity(value, places, len(re.sub(r"\D", "", number).lstrip("0")), percent, unit)


def same_quantity(truth: Quantity, answer: Quantity) -> bool:
    """Whether the answer means the ground truth.

    Units and percent signs may be missing on either side, but must not contradict each other. A decimal answer is not
    the fraction that it is near to; but an answer may be what a ground truth in decimals is a rounding of.
    """
    if truth.unit and answer.unit and truth.unit != answer.unit:
        factor = _conversion(answer.unit, truth.unit)
        if factor == 0:
            return False
        answer = answer._replace(value=answer.value * factor)
    hundredth = answer._replace(value=answer.value / 100)
    if truth.percent == answer.percent:
        return _close(truth, answer)
    if answer.percent:
        # "50%" for 50 (they asked for percent) and for 1/2; but 0.5 is a fraction, and "0.5%" is not it
        return _close(truth, hundredth) or (abs(truth.value) >= 1 and _close(truth, answer))
    return _close(truth, answer) or truth.value / 100 == answer.value


def _close(truth: Quantity, answer: Quantity) -> bool:
    gap = abs(truth.value - answer.value)
    if gap == 0 or (answer.digits >= FLOAT_DIGITS and gap * 10**FLOAT_DIGITS <= abs(truth.value)):
        return True
    rounding = truth.rounding
    if rounding is None or (answer.places is not None and (truth.digits < _SURE_DIGITS or answer.places <= rounding)):
        return False
    return gap <= Fraction(1, 2) / Fraction(10) ** rounding and answer.value.denominator > 1


def _conversion(unit: str, target: str) -> Fraction:
    """How many of the target one unit is: 0 when they measure different things, 1 when one of them is not known."""
    from sympy.physics import units  # 0.2 s, and rarely needed

    if {unit, target} == {"am", "pm"}:
        return Fraction(0)
    sizes = []
    for name in (unit, target):
        *kind, word = name.partition("^")[0].split(" ")
        found = getattr(units, word, None)
        if not isinstance(found, units.Quantity):
            return Fraction(1)
        exponent = int(name.partition("^")[2] or {"square": 2, "cubic": 3}.get("".join(kind), 1))
        sizes.append((Fraction(str(found.scale_factor)) ** exponent, found.dimension**exponent))
    (size, dimension), (target_size, target_dimension) = sizes
    return size / target_size if dimension == target_dimension else Fraction(0)
