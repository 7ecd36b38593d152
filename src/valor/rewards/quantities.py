"""Numbers in LaTeX with a unit or a percent sign: their exact value, and when two of them mean the same."""

import re
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from valor.rewards.numerals import chinese_number, with_digits

FLOAT_DIGITS = 9  # a decimal with so many right digits was calculated with floats, and stands for the exact value
CONJUNCTION = re.compile(
    r",? ?(?:\\text ?\{ ?(?:and|or|或者?|和|与) ?\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|或者?|和|与|以及) ?|;"
)
_SURE_DIGITS, _SURE_PLACES, _MAX_DIGITS = 3, 2, 400  # a decimal ground truth with fewer than sure is taken as exact
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_UNSIGNED = r"\d+(?:\.\d*)?|\.\d+"
_MIXED = re.compile(r"(?:(\d+) ?)?\\frac ?\{(-?\d+)\}\{(\d+)\}")
_QUANTITY = re.compile(
    rf"(?P<sign>[-+]?) ?[$¥€£]? ?(?P<inner>-?)(?:(?P<integer>\d+) (?=\d+/))?"
    rf"(?P<number>{_UNSIGNED}|\({_UNSIGNED}\))"
    rf"(?: ?\\(?:times|cdot) ?10 ?\^ ?\{{?(?P<power>[-+]?\d+)\}}?)?(?: ?[/:] ?(?P<bottom>{_UNSIGNED}))?(?P<rest>\D.*)?"
)
# Dimension (a digit is its power): the size of each unit and its names. Other words are nouns, and may be left out.
_TABLE = """
length: 1 m meter metre 米; 1000 km kilometer kilometre 千米 公里; .01 cm centimeter centimetre 厘米; .1 dm 分米
length: .001 mm millimeter 毫米; .0254 in inch; .3048 ft foot feet; .9144 yd yard; 1609.344 mi mile
length2: 10000 hectare 公顷; 4046.8564224 acre; 2000/3 亩
length3: .001 L liter litre 升; .000001 ml mL cc milliliter 毫升; .003785411784 gallon
mass: 1 g gram 克; 1000 kg kilogram 千克 公斤; .001 mg milligram 毫克; 453.59237 lb pound; 28.349523125 oz ounce
mass: 500 斤; 1000000 ton tonne 吨
time: 1 s sec second 秒; 60 min minute 分钟; 3600 h hr hour 小时; 86400 day 天; 604800 week 周 星期
months: 1 month 个月; 12 yr year 年 | angle: 1 ° deg degree 度 | percent: 1 % percent percentage; 10 折 成
dollar: 1 dollar; .01 cent | yuan: 1 yuan 元 元钱 块钱; .1 角 | am: 1 am | pm: 1 pm | ordinal: 1 th st nd rd
celsius: 1 °C 摄氏度 | fahrenheit: 1 °F | newton: 1 N newton 牛顿 | joule: 1 J joule 焦耳 | watt: 1 W watt; 1000 kW
volt: 1 V volt | byte: 1 byte; 1e6 MB; 1e9 GB
"""
_SCALE = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "万": 10**4, "亿": 10**8}
_POWERS = {"square": 2, "sq": 2, "平方": 2, "cubic": 3, "cu": 3, "立方": 3}
_COUNTED = "个只条本支枝件张块头匹人名位次倍岁份种根棵颗套辆台座间杯瓶盒箱袋道题步项组对双朵页层分"
_NO_NOUN = re.compile(
    r"and|or|for|plus|minus|times|not|mod|half|thirds?|where|over|to|is|choose|squared|cubed|less|more|than", re.I
)
_NOUN = re.compile(
    r"(?!sin|cos|tan|cot|sec|csc|log|exp|sqrt|arc|max|min|lim|theta|alpha|beta|gamma|delta|lambda|sigma|omega)"
    r"(?:(?=[a-z]{3})[a-z]+(?:[aeiou][a-z]*|s)|of)",
    re.IGNORECASE,
)


class Unit(NamedTuple):
    """The powers of its dimensions (none when it only names what is counted), and its size in their first units."""

    dimensions: frozenset[tuple[str, int]] = frozenset()
    size: Fraction = Fraction(1)


class Quantity(NamedTuple):
    """A number as written: `places` decimal places (None: written exactly), `digits` significant ones, and its unit."""

    value: Fraction
    places: int | None = None
    digits: int = 0
    unit: Unit = Unit()

    @property
    def rounding(self) -> int | None:
        """The decimal places that a ground truth may have been rounded to, None when it is taken as exact."""
        sure = self.places is not None and (self.digits >= _SURE_DIGITS or self.places >= _SURE_PLACES)
        return self.places if sure else None

    @property
    def percent(self) -> bool:
        return self.unit.dimensions == {("percent", 1)}


def _read_table() -> dict[str, tuple[str, int, Fraction]]:
    """Dimension, its power and the size of each unit by name."""
    units = {}
    for row in re.split(r"\n| \| ", _TABLE.strip()):
        dimension, entries = row.split(": ")
        for size, *names in (entry.split() for entry in entries.split("; ")):
            unit = (dimension.rstrip("23"), int(dimension[-1]) if dimension[-1].isdigit() else 1, Fraction(size))
            units |= dict.fromkeys(names, unit)
    return units


_UNITS = _read_table()
_CHINESE = "|".join(sorted((n for n in [*_UNITS, *_SCALE, *_POWERS] if n[0] > "\u4e00"), key=len, reverse=True))
_TOKEN = re.compile(
    rf"(?P<gap>[ .]*)(?:-(?='))?(?:(?P<per>/|'?\bper\b|每)|\^ ?\{{?(?P<power>[23])\}}?"
    rf"|(?P<word>{_CHINESE}|°[CF]?|%|'?[A-Za-z]+)|(?P<noun>[{_COUNTED}][\u4e00-\u9fff]{{0,6}}))"
)
_BARE = "|".join(n for n in [*_UNITS, *_SCALE] if n.isascii() and n[1:].isalpha())
# After a number, in a sentence.
_RAISED = r"(?:\^[23]|[²³])"
UNIT = (
    rf"\s*(?:\\?%|(?:{_CHINESE}|[{_COUNTED}])+|m{_RAISED}"
    rf"|(?:square |cubic )?(?:{_BARE})(?:e?s)?(?![A-Za-z0-9_]){_RAISED}?)"
)


def read_quantities(text: str) -> list[Quantity]:
    """The numbers of a list, one for a number alone; none for anything else."""
    parts = CONJUNCTION.sub(",", _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)).split(",")
    quantities = [read_quantity(part.strip()) for part in parts]
    return [quantity for quantity in quantities if quantity] if all(quantities) else []


def read_quantity(text: str) -> Quantity | None:
    """A text that is one number, fraction, mixed number or ratio, with a unit perhaps."""
    if len(text) > _MAX_DIGITS:
        return None
    if text[:1].isalpha() or text.startswith("\\text"):  # five, \text{thirty-six apples}
        text = re.sub(r"^\\text ?\{ ?(\d[^{}]*)\}", r"\1", with_digits(text))
        numeral, rest = chinese_number(text)
        text = numeral + rest if re.fullmatch(rf"(?:{_CHINESE}|[{_COUNTED}])*", rest) else text
    text = _MIXED.sub(lambda m: f"{m[1] + ' ' if m[1] else ''}{m[2]}/{m[3]}", text)
    match = _QUANTITY.fullmatch(re.sub(r"^([-+]?)10 ?(?=\^)", r"\g<1>1 \\times 10", text))
    unit = read_unit(match["rest"] or "") if match else None
    if not match or not unit:
        return None
    power, number = int(match["power"] or 0), match["number"].strip("()")
    bottom = Fraction(match["bottom"] or 1)
    if abs(power) > _MAX_DIGITS or not bottom:
        return None
    value = (Fraction(number) * Fraction(10) ** power / bottom) + int(match["integer"] or 0)
    places = None
    if match["bottom"] is None and ("." in number or power):
        places = len(number.partition(".")[2]) - power
    if (match["sign"] == "-") != (match["inner"] == "-"):
        value = -value
    return Quantity(value * unit[0], places, len(re.sub(r"\D", "", number).lstrip("0")), unit[1])


def read_unit(text: str) -> tuple[int, Unit] | None:
    """What stands after a number: the factor that a word like million is, and the unit. None when it is no unit.

    Letters are variables unless they are a known unit (one letter: after a space), in \\text, or a word of three or
    more after a space. A power belongs to a unit.
    """
    text = re.sub(r"\\text ?\{([^{}]*)\}", lambda m: re.sub("[A-Za-z]+", r"'\g<0>", m[1]), text)
    text = re.sub(r"\^ ?\\circ ?", "°", text.replace("\\%", "%")).rstrip(" .")
    scale, size, powers = 1, Fraction(1), Counter[str]()
    position, sign, power, latest = 0, 1, 1, None
    while position < len(text):
        token = _TOKEN.match(text, position)
        if not token:
            return None
        position, word = token.end(), token["word"] or ""
        name = word.lstrip("'")
        unit = (
            _named(name)
            if len(name) > 1 or token["gap"] or word != name or sign < 0 or not re.match("[A-Za-z]", name)
            else None
        )
        if token["per"]:
            sign = -1
        elif name.lower() in _SCALE:
            scale *= _SCALE[name.lower()]
        elif name.lower() in _POWERS:
            power = _POWERS[name.lower()]
        elif latest := unit or (latest if token["power"] else None):
            times = sign * (power if unit else int(token["power"]) - 1)
            powers[latest[0]] += latest[1] * times
            size *= latest[2] ** times
            power = 1
        elif not token["noun"] and (
            not name or _NO_NOUN.fullmatch(name) or (word == name and not (token["gap"] and _NOUN.fullmatch(name)))
        ):
            return None
    return scale, Unit(frozenset(item for item in powers.items() if item[1]), size)


def _named(word: str) -> tuple[str, int, Fraction] | None:
    forms = [word, word.lower(), word.lower().removesuffix("s"), word.lower().removesuffix("es")]
    return next((_UNITS[form] for form in forms if form in _UNITS and (len(form) > 1 or form == word)), None)


def same_quantity(truth: Quantity, answer: Quantity) -> bool:
    """Whether the answer means the ground truth.

    Units and percent signs may be missing on either side, but must not contradict each other. A decimal answer is not
    the fraction that it is near to; but an answer may be what a ground truth in decimals is a rounding of.
    """
    factor = answer.unit.size / truth.unit.size
    if truth.unit.dimensions == answer.unit.dimensions:
        return _close(truth, answer._replace(value=answer.value * factor))
    if answer.percent and not truth.unit.dimensions:
        # "50%" for 50 (they asked for percent) and for 1/2; but 0.5 is a fraction, and "0.5%" is not it
        hundredth = answer._replace(value=answer.value * factor / 100)
        return _close(truth, hundredth) or (abs(truth.value) >= 1 and _close(truth, answer))
    if truth.unit.dimensions and answer.unit.dimensions:
        return False
    return _close(truth, answer) or (truth.percent and truth.value * truth.unit.size / 100 == answer.value)


def _close(truth: Quantity, answer: Quantity) -> bool:
    gap = abs(truth.value - answer.value)
    # A whole number with all its digits is exact, however long.
    is_float = answer.digits >= FLOAT_DIGITS and (answer.value.denominator > 1 or (answer.places or 0) < 0)
    if gap == 0 or (is_float and gap * 10**FLOAT_DIGITS <= abs(truth.value)):
        return True
    rounding = truth.rounding
    if rounding is None or (answer.places is not None and (truth.digits < _SURE_DIGITS or answer.places <= rounding)):
        return False
    return gap <= Fraction(1, 2) / Fraction(10) ** rounding and answer.value.denominator > 1
