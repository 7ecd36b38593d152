"""Numbers in model text: finding them, and their exact value."""

import re
import unicodedata
from fractions import Fraction

# Full-width marks, digits and letters; the tilde is a range in Chinese and a space in LaTeX.
_HALF_WIDTH = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5E)} | str.maketrans(
    {"\u3000": " ", "\u3002": ". ", "\u3001": ", ", "\uff61": ". ", "\uffe1": "£", "\uffe5": "¥"}
)

# Sign and currency in either order, then 1,234.5 or 1234.5 or .5, an exponent, or a simple fraction 3/4.
# A minus is a sign unless it follows a digit, letter or closing bracket (10-3); digits inside a word (x2, H2O) and
# exponents (m^2) are no numbers.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
NUMBER = (
    r"(?P<sign>(?<![A-Za-z0-9_)\]}])[-\u2212+])?(?:[$€£¥](?P<inner>[-\u2212])?)?(?<![A-Za-z0-9_^])(?<!\^[-+{])(?P<digits>"
    + _DIGITS
    + r")"
    r"(?P<exponent>[eE][-+]?[0-9]{1,3}(?![0-9]))?(?:/(?P<denominator>[0-9]+)(?![0-9]|\.[0-9]))?"
)
_NUMBER = re.compile(NUMBER)

_ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WORDS = {word: i for i, word in enumerate(_ONES)} | {word: 10 * i for i, word in enumerate(_TENS, start=2)}
_NUMBER_WORDS = re.compile(rf"\b(?:({'|'.join(_TENS)})(?:[- ]({'|'.join(_ONES[1:10])}))?|({'|'.join(_ONES)}))\b", re.I)

_CHINESE = re.compile(
    r"(?P<minus>负)?(?:(?P<bottom>[一二两三四五六七八九十百千万]{1,20})分之)?"
    r"(?P<top>[〇零一二两三四五六七八九十百千万亿]{1,30})(?:点(?P<places>[〇零一二三四五六七八九]{1,20}))?"
)

# Longer numerals are degenerate output; their exact value would cost more than it is worth.
_MAX_DIGITS = 100


def half_width(text: str) -> str:
    """The text with ASCII marks, digits and letters for full-width ones, as Chinese is written with."""
    return text if text.isascii() else text.translate(_HALF_WIDTH)


def with_digits(text: str) -> str:
    """The text with number words up to ninety-nine as digits."""
    return _NUMBER_WORDS.sub(lambda m: str(sum(_WORDS[word.lower()] for word in m.groups() if word)), text)


def chinese_number(text: str) -> tuple[str, str]:
    """The Chinese numeral that the text starts with, in digits ("" without one), and the rest of the text."""
    match = _CHINESE.match(text)
    if not match:
        return "", text
    bottom, top, places = (match[name] or "" for name in ("bottom", "top", "places"))
    digits = f"{_chinese_integer(top)}{'.' if places else ''}{''.join(str(_chinese_integer(c)) for c in places)}"
    over = "%" if bottom == "百" else f"/{_chinese_integer(bottom)}" if bottom else ""
    return f"{'-' if match['minus'] else ''}{digits}{over}", text[match.end() :]


def _chinese_integer(text: str) -> int:
    total = section = digit = 0
    for character in text:
        value = 2 if character == "两" else int(unicodedata.numeric(character))
        if value < 10:
            digit = 10 * digit + value
        elif value < 10_000:
            section, digit = section + (digit or 1) * value, 0
        else:
            total, section, digit = (total + section + digit) * value, 0, 0
    return total + section + digit


def plain(text: str) -> str:
    """The text without LaTeX spellings around numbers: `\\$36`, `10{,}000`, `10\\,000`; half-width."""
    return half_width(text).replace("\\$", "$").replace("{,}", ",").replace("\\,", "").replace("\\!", "")


def number_value(match: re.Match[str]) -> Fraction | None:
    """Exact value of a NUMBER match; None when it is over-long or divides by zero."""
    digits = match["digits"].replace(",", "")
    denominator = match["denominator"] or "1"
    exponent = int((match["exponent"] or "e0")[1:])
    if max(len(digits), len(denominator), abs(exponent)) > _MAX_DIGITS or not denominator.strip("0"):
        return None
    value = Fraction(f"{digits}e{exponent}") / int(denominator)
    negative = (match["sign"] in ("-", "\u2212")) != (match["inner"] is not None)
    return -value if negative else value


def last_number(text: str) -> tuple[str, Fraction] | None:
    """The last number anywhere in the text, as written and as value; None when there is none."""
    match = last_match(_NUMBER, plain(text))
    value = number_value(match) if match else None
    return None if match is None or value is None else (match[0], value)


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last of the pattern's matches, None without any."""
    last = None
    for match in pattern.finditer(text):
        last = match
    return last


def ground_truth_number(ground_truth: object) -> Fraction:
    """The value of a ground truth that is one number and nothing else (a trailing period is let through).

    Raises ValueError for any other: the data is wrong.
    """
    match = _NUMBER.fullmatch(plain(str(ground_truth)).strip().removesuffix("."))
    value = number_value(match) if match else None
    if value is None:
        raise ValueError(f"the ground truth is not a number: {str(ground_truth)[:40]!r}")
    return value
