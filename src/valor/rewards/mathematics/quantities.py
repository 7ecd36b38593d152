"""Numbers with a unit or a percent sign: their exact value, and when two of them mean the same."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from valor.rewards.numerals import with_digits


class Quantity(NamedTuple):
    """A number as written: `places` decimal places (None: written exactly), `digits` significant ones."""

    value: Fraction
    places: int | None = None
    digits: int = 0
    percent: bool = False
    unit: str = ""


_UNSIGNED = r"(?:\d{1,3}(?: \d{3})+(?![\d/])|\d+(?:\.\d*)?|\.\d+)"
_SIGNED = rf"[-+]? ?{_UNSIGNED}"
_NUMBER = re.compile(
    rf"(?:\\approx ?|≈ ?)?(?P<sign>[-+]?) ?(?P<money>“\$”)?(?:Rs\.? ?|USD ?|US)?(?P<inner>-?) ?(?:"
    rf"(?P<whole>\d+)\\frac\{{(?P<part>\d+)\}}\{{(?P<of>\d+)\}}"
    rf"|\\frac\{{(?P<top>{_SIGNED})\}}\{{(?P<bottom>{_SIGNED})\}}"
    rf"|(?P<top2>{_UNSIGNED}) ?[/:] ?(?P<bottom2>{_UNSIGNED})"
    rf"|\((?P<inside>{_SIGNED})\)"
    rf"|10 ?\^\{{?(?P<ten>[-+]? ?\d+)\}}?"
    rf"|(?P<number>{_UNSIGNED})(?:(?: ?\* ?10 ?\^\{{?|[eE])(?P<power>[-+]? ?\d+)\}}?)?)"
)
_POWER = r"(?:\^?\{?(?P<p>-?\d)\}?(?!\d))?"
_REST = re.compile(rf"(?: ?(?:“[^“”]*”|[A-Za-z]+\.?){_POWER.replace('P<p>', ':')}| ?[/*.,] ?| ?%| ?°)*")
_WORDS = re.compile(rf"(?:“(?P<quoted>[^“”]*)”|(?P<plain>[A-Za-z]+)\.?){_POWER}")
_SHORT = frozenset(("sq", "cu", "rs"))  # said with numbers, but no units by themselves
_NO_UNIT = frozenset(("and", "for", "plus", "minus", "times", "not", "mod", "when", "where", "with"))
_PART = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10}
_PARTS = re.compile(rf"^(\d+)“?[- ]?({'|'.join(_PART)})s?”?$")
_SCALE = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

# dimension: unit spelled in any of these ways = so many of the dimension's base
_UNITS: dict[str, dict[str, str]] = {
    "length": {"mm": "1/1000", "cm": "1/100", "dm": "1/10", "m": "1", "km": "1000", "inch": "0.0254", "in": "0.0254",
               "inches": "0.0254", "ft": "0.3048", "foot": "0.3048", "feet": "0.3048", "yd": "0.9144", "yard": "0.9144",
               "mi": "1609.344", "mile": "1609.344", "meter": "1", "metre": "1", "centimeter": "1/100",
               "centimetre": "1/100", "millimeter": "1/1000", "kilometer": "1000", "kilometre": "1000"},
    "mass": {"mg": "1/1000", "g": "1", "kg": "1000", "gram": "1", "kilogram": "1000", "lb": "453.59237",
             "lbs": "453.59237", "pound": "453.59237", "oz": "28.349523125", "ounce": "28.349523125", "ton": "1000000"},
    "time": {"s": "1", "sec": "1", "second": "1", "min": "60", "minute": "60", "h": "3600", "hr": "3600",
             "hour": "3600", "day": "86400", "week": "604800"},
    "force": {"N": "1", "kN": "1000", "newton": "1"},
    "energy": {"J": "1", "kJ": "1000", "joule": "1"},
    "power": {"W": "1", "kW": "1000", "watt": "1"},
    "voltage": {"V": "1", "volt": "1"},
    "volume": {"ml": "1/1000", "mL": "1/1000", "l": "1", "L": "1", "liter": "1", "litre": "1"},
    "money": {"cent": "1/100", "dollar": "1", "USD": "1"},
    "morning": {"am": "1"},
    "afternoon": {"pm": "1"},
}  # fmt: skip
_UNIT = {name: (dimension, Fraction(size)) for dimension, units in _UNITS.items() for name, size in units.items()}
_MAX_DIGITS = 400
_SURE_DIGITS = 3  # a ground truth in decimals with fewer significant digits is taken as exact
_CLOSE = Fraction(1, 10_000)  # a rounded answer may be this far off, relatively
_FLOAT_NOISE = Fraction(1, 10**9)


def read_quantity(text: str) -> Quantity | None:
    """A normalized text that is one number, fraction, mixed number, ratio or compound (2 hours 15 minutes)."""
    if text[:1].isalpha() or text[:1] == "“":  # five, “thirty-six apples”, two thirds
        text = re.sub(r"^“(\d+) ?([^”]*)”", lambda m: m[1] + (m[2] and f"“{m[2]}”"), with_digits(text))
        text = _PARTS.sub(lambda m: f"\\frac{{{m[1]}}}{{{_PART[m[2]]}}}", text)
    parts: list[Quantity] = []
    position = 0
    while position < len(text):
        found = _NUMBER.match(text, position)
        if not found or len(found[0]) > _MAX_DIGITS:
            return None
        rest = _REST.match(text, found.end())
        assert rest is not None
        part = _quantity(found, rest[0])
        if part is None:
            return None
        parts.append(part)
        position = rest.end()
        while position < len(text) and text[position] == " ":
            position += 1
    if len(parts) > 1:
        return _sum(parts)
    return parts[0] if parts else None


def same_quantity(truth: Quantity, answer: Quantity) -> bool:
    """Whether the answer means the ground truth.

    Units and percent signs may be missing on either side, but must not contradict each other. A decimal stands for
    what it is a correct rounding of: an answer if it is within 1e-4 of it, relatively, a ground truth if it has three
    significant digits or more.
    """
    if truth.unit and answer.unit and truth.unit != answer.unit:
        (dimension, size), (other, other_size) = _unit(truth.unit), _unit(answer.unit)
        if dimension != other:
            return False
        answer = _times(answer, other_size / size)
    if truth.percent == answer.percent:
        return _close(truth, answer)
    if answer.percent:
        # "50%" for 50 (they asked for percent) and for 1/2; but 0.5 is a fraction, and "0.5%" is not it
        return _close(truth, _times(answer, Fraction(1, 100))) or (abs(truth.value) >= 1 and _close(truth, answer))
    return _close(truth, answer) or _close(_times(truth, Fraction(1, 100)), answer)


def _close(truth: Quantity, answer: Quantity) -> bool:
    gap = abs(truth.value - answer.value)
    if gap == 0:
        return True
    size = abs(truth.value)
    if answer.places is not None:
        ulp = Fraction(1, 2) / Fraction(10) ** answer.places
        if (gap <= ulp and gap <= _CLOSE * size) or (answer.digits >= 9 and gap <= _FLOAT_NOISE * size):
            return True
    if truth.places is None:
        return False
    rounds_to_truth = gap <= Fraction(1, 2) / Fraction(10) ** truth.places
    if answer.places is None:
        # 1/3 for 0.33: no decimal could have been exact
        endless = _is_endless(answer.value) and truth.places > 1
        return rounds_to_truth and (endless or (truth.digits >= _SURE_DIGITS and answer.value.denominator > 1))
    return rounds_to_truth and truth.digits >= _SURE_DIGITS and answer.places > truth.places


def _is_endless(value: Fraction) -> bool:
    """Whether its decimals never end."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest > 1


def _quantity(match: re.Match[str], rest: str) -> Quantity | None:
    m = match.groupdict()
    top, bottom, places, digits = m["top"] or m["top2"], m["bottom"] or m["bottom2"], None, 0
    exponent = int((m["ten"] or m["power"] or "0").replace(" ", ""))
    if abs(exponent) > _MAX_DIGITS or (bottom and not _fraction(bottom)):
        return None
    if m["whole"]:
        part, of = int(m["part"]), int(m["of"])
        if part >= of:
            return None
        value = int(m["whole"]) + Fraction(part, of)
    elif top:
        value = _fraction(top) / _fraction(bottom)
    else:
        number = m["number"] or m["inside"] or "1"
        value = _fraction(number) * Fraction(10) ** exponent
        if "." in number or m["power"]:
            places = len(number.partition(".")[2]) - exponent
            digits = len(re.sub(r"\D", "", number).lstrip("0"))
    if (m["sign"] == "-") != (m["inner"] == "-"):
        value = -value
    quantity = _with_unit(Quantity(value, places, digits), rest)
    return quantity._replace(unit=quantity.unit or "dollar") if quantity and m["money"] else quantity


def _with_unit(number: Quantity, rest: str) -> Quantity | None:
    """The number with what follows it taken as percent sign or unit; None when it is neither."""
    percent, units = "%" in rest, []
    for match in _WORDS.finditer(rest):
        for word in (match["quoted"] or match["plain"] or "").split():
            name = word.rstrip(".")
            name = name.lower() if name in ("AM", "PM") else name
            unit = name if name in _UNIT else name.removesuffix("s")
            if name.lower() in _SCALE:
                number = _times(number, Fraction(10) ** _SCALE[name.lower()])
            elif name.lower() in ("percent", "percentage"):
                percent = True
            elif name == "and" and units:
                pass  # 2 hours and 15 minutes
            elif match["plain"] and not (
                (unit in _UNIT and (len(name) > 1 or units or rest[0] == " "))  # 5m may be a product
                or name.lower() in _SHORT
                or (len(name) > 2 and name.lower() not in _NO_UNIT)
            ):
                return None  # 5x, 2i, 3 or 4
            else:
                units.append((unit, match["p"]))
    comparable = len(units) == 1 and units[0][0] in _UNIT and "/" not in rest
    unit = units[0][0] + (f"^{units[0][1]}" if units[0][1] else "") if comparable else ""
    return number._replace(percent=percent, unit=unit)


def _unit(unit: str) -> tuple[str, Fraction]:
    name, _, power = unit.partition("^")
    dimension, size = _UNIT[name]
    return dimension + power, size ** int(power or 1)


def _sum(parts: list[Quantity]) -> Quantity | None:
    """Hours and minutes, feet and inches: as many of the last unit."""
    if not all(p.unit for p in parts) or len({_unit(p.unit)[0] for p in parts}) > 1:
        return None
    last = _unit(parts[-1].unit)[1]
    return Quantity(sum((p.value * _unit(p.unit)[1] / last for p in parts), Fraction(0)), unit=parts[-1].unit)


def _times(number: Quantity, factor: Fraction) -> Quantity:
    places = number.places
    if places is not None:
        shift = len(str(factor.denominator)) - len(str(factor.numerator))  # exact for powers of ten, near it otherwise
        places += shift
    return number._replace(value=number.value * factor, places=places)


def _fraction(number: str) -> Fraction:
    return Fraction(number.replace(" ", "").rstrip("."))
