# ruff: noqa: RUF001  (mathematical characters are what this is about)
"""Mathematics problems with one final answer: MATH, MATH-500, DAPO, AIME, AMC, Minerva, OlympiadBench, NuminaMath.

Whether two formulas are equal is decided by math-verify, with its own parser and comparison. Decided here, because it
is exact and a hundred times faster: plain numbers with their units, letters of options, words. Spellings that
math-verify does not know are rewritten first. Its time limits are signals, which only reach the main thread and turn
into a silent "wrong"; they are switched off, and `run_within` ends a comparison in any thread with an error.
"""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from valor.rewards.answers import after_marks, boxed, final_answers
from valor.rewards.deadline import run_within
from valor.rewards.numerals import half_width
from valor.rewards.parameters import of_one_parameter
from valor.rewards.quantities import CONJUNCTION, Unit, read_quantities, read_unit, same_quantity
from valor.rewards.solutions import as_points

SECONDS = 1.3  # of computing, for one comparison by math-verify
_MAX_LENGTH, _MAX_TRUTHS = 2000, 10  # characters of an answer; a longer one is degenerate output, and wrong
_MAX_FORMULA, _MAX_NESTING = 400, 12
# What Python would compute in one call that nothing can interrupt: powers of powers, long numbers, huge factorials.
_HUGE = re.compile(
    r"\^\s*\{[^{}]*\}?\s*\^|\^\s*\([^()]*\^|\^\s*\w+\s*\^"  # a power in an exponent
    r"|\^[^()]{0,20}\)\s*\}?\s*\^\s*\{?\s*-?\d{3}"  # a large power of a power
    r"|\^\s*[{(]?\s*-?\d{5}|\d{40}|\d{4}\s*\)?!|!\s*\)?\s*!|binom\s*\{\s*(?:\d{5}|[^{}]*\^)"
)

_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "÷": "/", "∕": "/",
        "≠": r"\neq ", "≤": r"\leq ", "⩽": r"\leq ", "≥": r"\geq ", "⩾": r"\geq ", "∞": r"\infty ", "π": r"\pi ",
        "½": r"\frac{1}{2}", "°": r"^\circ ", "±": r"\pm ", "∅": r"\emptyset ", "∪": r"\cup ",
        "∈": r"\in ", "θ": r"\theta ", "√": r"\sqrt ", "≈": r"\approx ",
        "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
        "∩": r"\cap ", "△": r"\triangle ", "∠": r"\angle ", "℃": r"^\circ C", "㎡": " m^2", "㎝": "cm", "㎏": "kg",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "′": "'",
    }
)  # fmt: skip
_RAISED = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_METRES = re.compile("(?<=[0-9])m(?=[²³])")
# "\\text" and the like in data that went through a Python string without the r
_DAMAGED = re.compile(
    r"\t(?=ext|imes|heta|frac|an\b|au\b|riangle)|\f(?=rac|orall)|\x08(?=oxed|inom|eta\b)|\x07(?=lpha|ngle|pprox)"
)
_ESCAPES = {"\t": r"\t", "\f": r"\f", "\b": r"\b", "\a": r"\a"}
_REPEATING = re.compile(r"(\d{0,15})\.(\d{0,15})(?:\\(?:overline|bar|dot)\s*\{?(\d{1,15})\}?|(?<=\.)\((\d{1,15})\))")
_FUNCTION = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|arcc?tg|c?tg|log|ln|lg|exp|lim|max|min|gcd|lcm|det|bmod"
_OTHER_NAMES = {"lg": r"\log_{10} ", "tg": r"\tan ", "ctg": r"\cot ", "arctg": r"\arctan ", "arcctg": r"\arccot "}
_UNIT_BEFORE = re.compile(r"(?:[\d})]|\\circ) ?$|/ ?$")

_CONDITION = re.compile(r"[ ,]*& ?,?(?: ?\\text ?\{ ?(?:if|for|when|当) ?\}| ?(?:if|for|when)(?![a-z])| ?当)? ?")


def _upright(match: re.Match[str]) -> str:
    """Upright letters are the letters, and names of functions the functions; anything else is a unit or text."""
    command, name = match[1] or "rm", match[2] or match[3]
    after_number = _UNIT_BEFORE.search(match.string[: match.start()])
    is_time = after_number and name in ("min", "sec") and not re.search("[A-Za-z(]", match.string[match.end() :])
    if re.fullmatch(_FUNCTION, name) and not is_time:
        return _OTHER_NAMES.get(name, f"\\{name} ")
    if name in ("e", "i", "d") or (len(name) == 1 and not after_number):
        return name
    return name if name.isupper() and command != "text" and not after_number else rf"\text{{{name}}}"


def _as_list(match: re.Match[str]) -> str:
    """Of equations one below the other; of a function's cases a set of values with their conditions."""
    rows = [
        re.sub(r"^\{([^{}]*)\}$", r"\1", row.strip(" ,.").replace(".}", "}"))
        for row in match[1].split(r"\\")
        if row.strip()
    ]
    if "&" not in match[1]:
        return ",".join(rows)
    pairs = [f"({_CONDITION.sub(',', row)})" for row in rows]
    return r"\{" + ",".join(pairs) + r"\}"


_RULES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"(?<=\d)(?:\\[,!;: ]\s?|\{,\}\s?)+(?=\d{3}(?!\d))"), ""),  # 10\,000  10{,}000  10\ 000
    (re.compile(r",\\!\s*(?=\d{3})"), ","),  # 11,\! 111
    (re.compile(r"\\(?:!|displaystyle|textstyle|phantom\{[^{}]*\}|(?:text)?color\{[^{}]*\})"), ""),
    (re.compile(r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-z])|(?<=\\\\)\[[\d.]+[a-z]+\]|\s+"), " "),
    (
        re.compile(r"(?:\\left ?)?\\\{ ?\\begin\{array\}\{[lcr| ]*\}((?:(?!\\end).)*)\\end\{array\}(?: ?\\right ?\.)?"),
        r"\\begin{cases}\1\\end{cases}",
    ),
    (re.compile(r"\\end\{cases\} ?(?=\\begin)"), r"\\end{cases},"),
    (re.compile(r"\\begin\{cases\}(.*?)\\end\{cases\}"), _as_list),
    (re.compile(r"(?<![\w)\]}|!])\*\*(?=\S)|(?<=\S)\*\*(?![\w({\\-])", re.A), ""),  # bold
    (re.compile(r"\*\* ?(-?\w+)|\*\*"), lambda m: f"^{{{m[1]}}}" if m[1] else "^"),
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-z])"), ""),
    (re.compile(r"\\math(?:bf|bb) ?\{? ?([RNZQ])(?![A-Za-z]) ?\}?|(?<=\\in) ?([RNZQ])(?![A-Za-z])"), r"\\mathbb{\1\2}"),
    (re.compile(r"\\(?:boxed|fbox|mathbf|boldsymbol|overline|mathit|underline|emph)\s*\{([^{}]*)\}"), r"{\1}"),
    (re.compile(r"\\(?:mbox|textbf|textit|textrm|textup|textnormal)\s*(?=\{)"), r"\\text"),
    (
        re.compile(
            r"\\(text|mathrm|mathsf|mathop|operatorname\*?|rm)\s*\{ *([A-Za-z]+) *\}"
            r"|\{?\\(?:rm|mathrm) +([A-Za-z]+)\b\}?"
        ),
        _upright,
    ),
    (re.compile(r"\\(?:mathrm|mathsf|operatorname)\s*(?=\{)"), r"\\text"),
    (re.compile(r"\\(lg|c?tg|arcc?tg)(?![a-z])"), lambda m: _OTHER_NAMES[m[1]]),
    (re.compile(r"\\text\s*\{\s*(\([A-J]\))\s*\}\s*"), r"\1 "),
    (re.compile(r"\\text\s*\{\s*([-+]?\.?\d[^{}]*|\(?[A-J]\)?)\s*\}"), r"\1"),
    (
        re.compile(r"^\\?\{ ?([a-z]) ?(?:\\in ?\\mathbb\{R\} ?)?(?:\\mid|\\vert|\||:) ?([^|:]*\1[^|:]*?)\\?\}$"),
        r"\2",
    ),  # {x | x > 1}
    (re.compile(r"\{([^{}]*)\\choose([^{}]*)\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"^\{([^{},]*)\}$"), r"\1"),
    (re.compile(r"(?<=[\w})\]]) ?(?:\\text ?\{ ?)?(?:或者?|和|与|以及) ?\}? ?(?=[-\w({\[\\])", re.A), " or "),
    (re.compile(r"(?<=[\w})\]]) ?(?:\\text ?\{ ?)?且 ?\}? ?(?=[-\w({\[\\])", re.A), " and "),
    (re.compile(r"负(?=[\d\\])"), "-"),
    (re.compile(r"^\](?=[^\[\]]*,[^\[\]]*[\[\]]$)"), "("),  # ]0,1]
    (re.compile(r"(?<=^[\[(])([^\[\]]*,[^\[\]]*)\[$"), r"\1)"),  # [0,1[
    (re.compile(r"\\langle"), "("),
    (re.compile(r"\\rangle"), ")"),
    (re.compile(r"(?<![A-Za-z\\])\\?sqrt ?(?:\(([^()]*)\)|(\d+))"), r"\\sqrt{\1\2}"),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\{[bB]matrix\}"), "{pmatrix}"),
    (re.compile(r"\\frac ?(\d) ?(\d)(?!\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\varnothing"), r"\\emptyset "),
    (re.compile(r"\^\s*\{?\s*(?:\\circ(?![a-z])|\\text\s*\{o\})\s*\}?"), r"^\\circ "),
    (re.compile(r"(?<![A-Za-z\\])(pi|theta|ln|log|sin|cos|tan)(?![a-z])"), r"\\\1 "),
    (re.compile("(?<=[①-⑳]) ?, ?(?=[①-⑳])"), ""),
    (re.compile("^一半$"), r"\\frac{1}{2}"),
    (re.compile(r"(?<![\d.,/])(\d{1,3}) (\d{3})(?![\d.,/])"), r"\1\2"),  # 10 000
    (re.compile(r"\b([ap])\. ?m\b\.?", re.I), r"\1m"),
    (re.compile(r"(?<=\d)[eE]([-+]?\d+)(?!\d)"), r" \\times 10^{\1}"),
    (re.compile(r"^\\(?:approx|text ?\{ ?(?:approximately|about) ?\}) ?|^(?:approximately|about) ", re.I), ""),
]
_NAME = re.compile(
    r"([A-Za-z](?:'|_\{?\w\}?|\([a-z0-9]\))?|\\[a-z]+(?: ?[A-Z])*|\|[A-Z]+\||[A-Z] ?\\c[au]p ?[A-Z])"
    r" ?(?:=|\\approx) ?(?!.*=)"
)
_ROOT = re.compile(r"(?<![A-Za-z\\])([a-z])(?:_\{?\d\}?)? ?= ?")
_INDEXED = re.compile(r"([A-Za-z])(?:_ ?\{?|\()(\d+)[})]? ?=(?!.*=)")
_BASE = re.compile(r"(?<=\d) ?_ ?\{? ?(\d+)")
_SET = re.compile(r"^\\?\{([^{}]*?)\\?\}$")
_CHOSEN = re.compile(r"(?:option |choice )?[(\[]?([A-J])(?:[)\].:,](?!\w)|$| [-:] )", re.IGNORECASE | re.ASCII)
_SEVERAL = re.compile("[A-H]{2,}|[①-⑳]{2,}")  # the right options of a question that has several
_LABELLED = re.compile(r"\(?([A-J])\s*[:.)]\s*(\S.*)")
_PLAIN_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:and|mod|sin|cos|tan|log|exp)\b)[A-Za-z]{3,}|[\u4e00-\u9fff]")
_PREDICATE = re.compile("^.*(?<!不)[是为](?:.{0,12}的)?(?=.)|^.*(?<!不)在(?=第)|^.*与.{1,6}?(?=相|平行|垂直|异面)")
_NOTHING = re.compile(
    r"\\emptyset|(?:\\text ?\{ ?)?(?:empty set|no(?: real)? solutions?|none|does not exist|dne"
    r"|(?:.{0,6}[为是])?空集|.{0,8}?(?:无|没有)(?:实数?)?[解根]|.{0,8}不存在)\}?",
    re.I,
)
_VERDICTS = [
    {"yes"}, {"no"}, {"true"}, {"false"}, {"正确", "对", "√", r"\sqrt", "是"},
    {"错误", "错", "不正确", "不对", "否", "不是", "×", r"\times"},
]  # fmt: skip
_TEXT_UNIT = re.compile(r" ?\\text ?\{ ?([^{}]+?) ?\}(?: ?\^ ?\{?\d\}?)?$")
_TRAILING_UNIT = re.compile(r"(?<=[\d})]) ?(?:\\text ?\{[^{}]*\}|[a-z]+|[\u4e00-\u9fff]{1,6})(?:\^\{?\d\}?)?$")


class Undecided(Exception):
    """Neither right nor wrong: it could not be found out."""


def grade(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    r"""Score 1 when the final answer means the ground truth (or one of a list), else 0.

    Components: `format` 1 when the answer is announced (`\boxed{}`, "The answer is", "Answer:", `####`, `<answer>`) and
    not just the last formula or number; `pred` the answer in one spelling (for majority votes). When math-verify could
    not decide in time, `error` says so, and the executor counts the sample as failed.
    """
    truths = _truths(ground_truth)
    answers = final_answers(solution_str)
    result: dict[str, Any] = {
        "score": 0.0,
        "format": float(bool(answers) and answers[0].stated),
        "pred": one_spelling(answers[0].text) if answers else "",
    }
    pairs = [(truth, answer.text) for answer in answers if len(answer.text) <= _MAX_LENGTH for truth in truths]
    verdicts = [equal(truth, text) for truth, text in pairs]
    if True in verdicts:
        return result | {"score": 1.0, "pred": one_spelling(pairs[verdicts.index(True)][1])}
    try:
        unread = [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict is None]
        return result | {"score": float(any_equal_by_algebra(unread))}
    except Undecided as error:
        return result | {"error": str(error)}


def equal(truth: str, answer: str) -> bool | None:
    """Whether the answer means the ground truth, both as written; None when that takes algebra."""
    truth, answer = _comparable(truth, answer)
    if not truth or not answer:
        return False
    if _characters(truth) == _characters(answer):
        return True
    first, second = (_INDEXED.match(text) for text in (truth, answer))
    if first and second and first[1] == second[1] and first[2] != second[2]:  # a_1 = 3 and a_2 = 3
        return False
    bases = [sorted(_BASE.findall(text)) for text in (truth, answer)]
    if all(bases) and bases[0] != bases[1]:  # which math-verify does not read
        return False
    for compare in (_same_choice, _same_number):
        verdict = compare(truth, answer)
        if verdict is not None:
            return verdict
    return _same_words(*_without_units(truth, answer))


def _comparable(truth: str, answer: str) -> tuple[str, str]:
    return as_points(*of_one_parameter(clean(truth), clean(answer)))


def _characters(text: str) -> str:
    return _plain_text(text).replace(" ", "")


def _plain_text(text: str) -> str:
    return re.sub(r"\\(?:text|mathbb) ?\{([^{}]*)\}", r"\1", text)


def one_spelling(answer: str) -> str:
    """The answer as text, the same for 1/2, 0.5 and \\frac{1}{2}."""
    text = clean(answer[:_MAX_LENGTH])
    numbers = read_quantities(text)
    return text.replace(" ", "") if len(numbers) != 1 else f"{numbers[0].value}{'%' if numbers[0].percent else ''}"


def clean(text: str) -> str:
    """The text in LaTeX that math-verify reads: without dollars and spacing, one spelling for each command."""
    text = _without_delimiters(_DAMAGED.sub(lambda m: _ESCAPES[m[0]], half_width(text)).strip())
    text = _METRES.sub(" m", text.replace(r"\$", "$"))
    text = _RAISED.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    text = _REPEATING.sub(_as_fraction, text.translate(_CHARACTERS))
    text = re.sub(r"\$(?! ?[-+]?[\d.])", "", text)
    for pattern, new in _RULES:
        text = pattern.sub(new, text)
    return text.rstrip(" .,;:\\").lstrip(" ,;:")


def _without_delimiters(text: str) -> str:
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`")):
        inside = text[len(left) : -len(right)]
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right) and left not in inside:
            return _without_delimiters(inside.strip())
    return text


def _as_fraction(match: re.Match[str]) -> str:
    """Of repeating decimals: 0.1666… as 15/90."""
    once, again = match[1] + match[2], match[3] or match[4]
    return f"\\frac{{{int(once + again) - int(once or '0')}}}{{{10 ** len(match[2]) * (10 ** len(again) - 1)}}}"


def _same_choice(truth: str, answer: str) -> bool | None:
    choice, labelled = re.fullmatch(r"\(?([A-J])\)?", truth), _LABELLED.fullmatch(truth)
    letter, chosen = _CHOSEN.match(answer), _LABELLED.fullmatch(answer)
    if choice:
        return letter[1].upper() == choice[1] if letter else None
    if _SEVERAL.fullmatch(truth) and sorted(re.sub(r"\\text|and|和|[\s,;&{}()]", "", answer)) == sorted(set(truth)):
        return True
    if chosen and equal(truth, chosen[2]):  # "(B) 12" for 12
        return True
    if labelled:  # "B: -1" in data made of multiple choice
        return equal(labelled[1], answer) or equal(labelled[2], answer)
    return None


def _same_words(truth: str, answer: str) -> bool | None:
    if _NOTHING.fullmatch(truth) or _NOTHING.fullmatch(answer):
        return bool(_NOTHING.fullmatch(truth) and _NOTHING.fullmatch(answer))
    for verdict in _VERDICTS:
        if _plain_text(truth).lower() in verdict:
            return re.split(r"[\s,.:;]|because|因为|的", _plain_text(answer).lower().strip())[0] in verdict
    if not _has_words(truth):
        return False if _has_words(answer) else None
    if _words(truth) in (_words(answer), _words(_PREDICATE.sub("", answer))):
        return True
    return None if re.search(r"\d|\\(?!text)|[=<>]", truth) else False


def _words(text: str) -> list[str]:
    """In lower case, without articles and conjunctions in Chinese terms; the items of a list in alphabetical order."""
    text = re.sub("[而且也又既]|条件$", "", text).replace("充分必要", "充要")
    items = text.lower().replace("\\text", "").split(",")
    words_of = [re.findall(r"\w+|[^\w\s{}.;:!?'()\\-]", item) for item in items]
    return sorted(" ".join(word for word in words if word not in ("the", "a", "an")) for words in words_of)


def _has_words(text: str) -> bool:
    """Whether there is a word that is no command, apart from a unit at the end: of three letters, or Chinese."""
    return bool(_PLAIN_WORD.search(_TRAILING_UNIT.sub("", CONJUNCTION.sub(",", text))))


def _same_number(truth: str, answer: str) -> bool | None:
    """Numbers, and lists of numbers in any order."""
    named, other = _NAME.match(truth), _NAME.match(answer)
    if bool(named) != bool(other) or (named and other and named[1] == other[1]):
        truth, answer = _NAME.sub("", truth, count=1), _NAME.sub("", answer, count=1)
    letters = [{match[1] for match in _ROOT.finditer(text)} for text in (truth, answer)]
    if len(letters[0] | letters[1]) == 1:
        truth, answer = _ROOT.sub("", truth), _ROOT.sub("", answer)
    truths, answers = (read_quantities(_SET.sub(r"\1", text)) for text in (truth, answer))
    if not answers and any(quantity.unit.dimensions for quantity in truths):
        answers = read_quantities(re.sub(r"(?<=\d)([A-Za-z])$", r" \1", answer))  # 500g where grams are meant
    if not truths or not answers:
        return None
    for a in truths:
        match = next((b for b in answers if same_quantity(a, b)), None)
        if match is None:
            return False
        answers.remove(match)
    return not answers


def _without_units(truth: str, answer: str) -> tuple[str, str]:
    """Formulas without a unit at their end that only one of them has, or that is the same."""
    formulas, units = zip(*map(_unit_apart, (truth, answer)), strict=True)
    return formulas if None in units or units[0] == units[1] else (truth, answer)


def _unit_apart(text: str) -> tuple[str, Unit | None]:
    match = _TEXT_UNIT.search(text)
    if match and match.start() and (read := read_unit(match[0])):
        factor, unit = read
        if factor == 1 and (unit.dimensions or match[1].endswith(("unit", "units"))):
            return text[: match.start()], unit
    return text, None


def is_too_large(text: str) -> bool:
    """Whether parsing or evaluating the text could take long."""
    depths = accumulate((c in "([{") - (c in ")]}") for c in text[:_MAX_FORMULA])
    return len(text) > _MAX_FORMULA or max(depths, default=0) > _MAX_NESTING or bool(_HUGE.search(text))


def any_equal_by_algebra(pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether math-verify finds an answer equal to its ground truth. A too large answer to a modest truth is not.

    Raises Undecided after `SECONDS`, and for a ground truth that is too large.
    """
    pairs = [_without_units(*_comparable(*pair)) for pair in pairs]
    safe = [pair for pair in pairs if not any(map(is_too_large, pair))]
    if safe:
        same, forget = _library()
        try:
            if run_within(SECONDS, lambda: any(same(truth, answer) for truth, answer in safe)):
                return True
        except TimeoutError:
            forget()
            raise Undecided(f"computer algebra did not decide within {SECONDS:g} s") from None
    if any(is_too_large(truth) for truth, _ in pairs):
        raise Undecided("the ground truth is too large for computer algebra")
    return False


def _library() -> tuple[Callable[[str, str], bool], Callable[[], None]]:
    from valor.rewards import algebra  # most of a second and 60 MB

    return algebra.same, algebra.forget


def _truths(ground_truth: Any) -> list[str]:
    """The acceptable answers. Raises ValueError when there is none: the data is wrong."""
    values = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    for value in values:
        if isinstance(value, Mapping | list | tuple):
            raise ValueError(f"the ground truth is a text, a number or a list of such, and not {value!r:.40}")
    texts = [str(t).strip() for t in values if t is not None]
    truths = [boxed(t) or after_marks(t) or t for t in texts if t]
    if not truths:
        raise ValueError("the ground truth is empty")
    return truths[:_MAX_TRUTHS]
