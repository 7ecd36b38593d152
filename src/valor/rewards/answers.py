"""Where a response states its final answer, whatever the task."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from valor.rewards.numerals import half_width, last_number
from valor.rewards.quantities import UNIT, read_quantities


class Answer(NamedTuple):
    """A final answer as written. `stated` is False when nothing in the response announces it."""

    text: str
    stated: bool


_THOUGHT_ENDS = re.compile(r"</think>|assistantfinal|<\|channel\|>final<\|message\|>")  # also without special tokens
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*([^\s{}$\\]+)")
_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{[^{}]*$")
_SPACE = r"(?:[\s$\\()\[\],;.!~]|\\q?quad(?![a-z]))*"
_BETWEEN_BOXES = re.compile(
    rf"{_SPACE}(?:(?:\\text\s*\{{\s*)?(?:and|or|和|与|或者?)\s*\}}?{_SPACE})?(?:[A-Za-z](?:_\{{?\w\}}?)?\s*=\s*)?"
)
# In half-width text. What ends with the mark, the verb or the line; Chinese has no spaces around it.
_ANNOUNCED = re.compile(
    r"\b(?:answers?|correct (?:options?|choices?))\b"
    r"(?:[^\n.:=]{0,60}?\b(?:is|are|equals|(?:would|should|must|will) be)\b[*_\s]*[:=]?|[*_\s]*[:=]|\*\*\s*\n)"
    r"|(?:答案|正确选项|正确的选项|正确结果|最终结果)[\]】*_”」\s]*"
    r"(?:(?:应该?|应当|就|即|分别|也)*(?:是|为|选|等于)|[:=]|(?<=[\]】])|(?=\n|[-\d$\\(]))\s*[:=]?"
    r"|(?:^|(?<=[\n.,;*]))\s*答\s*[:,]"
    r"|(?<![不没可若如])(?:故|应该?|应当|因此|所以|我|本题)?选(?:择|项是|项为)?\s*[:,]?\s*(?=[(*$]{0,3}[A-Z]{1,6}(?![A-Za-z]))",
    re.IGNORECASE | re.MULTILINE,
)
# What counts when nothing is announced: the first of these that is there.
_CONCLUDED = [
    re.compile(r"综上(?:所述|可知|可得|得)?\s*[:,]?"),
    re.compile(r"(?:解得|可得|求得|因此|所以|从而|于是|∴|(?<![原缘无何])故)\s*[:,]?"),
]
# Before an announcement: it is somebody else's, or only thought of.
_REPORTED = re.compile(
    r"(?:\b(?:if|suppose|assum\w+|whether|says|said|claim(?:s|ed)|told|(?:people|they|some|others) (?:say|think))\b"
    r"|(?<!\bI )(?<!\bwe )\b(?:think|believe|thought|thinks|believes)\b|n't (?:think|believe|say)|\bdoubt\b"
    r"|(?<![我们])(?:说|认为|以为|声称|觉得)|误以为|不认为|不觉得|如果|假如|假设|倘若|若)[^.,;?!\n]{0,40}$",
    re.IGNORECASE,
)
# Words of denial, in front of what is denied or behind it.
NOT = (
    r"(?:\b(?:not|never|neither|nor|cannot|except|unlike|rather than|instead of|other than|anything but)\b"
    r"|n['\u2019]t\b|并非|而非|排除|除了?|不(?:会|能|可能|应该?|认为|觉得)?(?:是|为|选|等于)|\u2260|\\neq?\b)"
)
WRONG = r"(?:wrong|incorrect|false|mistaken|untrue)"
_DENIAL = rf"{NOT}(?: be)?(?: equal)?(?: to)?\s*"
_DENIED = re.compile(rf"[\s*_]*{_DENIAL}(?:[-$\\(\d*]|[A-Z]\b)")
DENIED_BEFORE = re.compile(rf"{_DENIAL}[$(\\*+-]*$")
_REFUTED = re.compile(
    r"\S{1,20}?[\s,;*]*(?:\b(?:but|and|yet)\b\s*)?(?:\b(?:that|this|it|which)\b\s*)?(?:\b(?:is|was)|'s)\s+"
    rf"(?:{WRONG}|not (?:right|correct|true))\b"
    r"|\S{1,20}?[\s,;*]*(?:但|可|而)?是?(?:这|那|他|她|它|该|此)?\S{0,4}?(?:是错|错了|错误|不对|不正确)",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<!\bRs)[.?](?=[\s*\"')\]\u4e00-\u9fff]|$)|\n|</")
_MATH = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PROSE = re.compile(r"(?<![\\A-Za-z])(?!(?:and|or|pi|sqrt|sin|cos|tan|log|ln|exp)\b)[A-Za-z]{2,}|[\u4e00-\u9fff]")
_GROUP = r"[(\[][^()\[\]\n=<>:]{1,80},[^()\[\]\n=<>:]{1,80}[)\]]"
_GROUP_AT_END = re.compile(rf"(?<![A-Za-z0-9_)])({_GROUP}(?:\s*(?:\u222a|\\cup|U)\s*{_GROUP}){{0,8}})[\s.*]*$")
_JOIN = r"\s*(?:,\s*(?:or|and)\b|,|\bor\b(?: maybe| perhaps)?|\band\b|或者?|还是|和|与)\s*"
_LIST_BEFORE = re.compile(rf"(?:(?>[-+]?\$?(?<![\w.])\d+(?:[.,/]\d+)*)(?>{UNIT})?{_JOIN})+$")
# Of a Chinese sentence: a formula at its end, and what comes behind the answer.
_FORMULA_AT_END = re.compile(r"[^\u4e00-\u9fff]+(?:(?:或者?|和|与|且|以及)[^\u4e00-\u9fff]+){0,9}$")
_AFTERTHOUGHT = re.compile(
    r"[,;(] ?(?:因为|由于|其中|此时|理由|验证|所以|即|也就是|而不是|不是|而非|而|舍|不合)|\([^()]*(?:舍|不合)[^()]*\)"
)
_TERM = re.compile(r"(?<![A-Za-z])[a-z]\s*[-+*/^]\s*$")
_REACH = 10_000  # characters at the end in which "the answer is" counts
_LEADING = re.compile(r"(?:\\?\$)?-?\d[\d,.]*(?:/\d+)?(?:" + UNIT + r")?(?=\s|$|,)(?!\s*or\b)|\$[^$]+\$")
_CLAUSE = 100  # characters before an announcement that say whose it is
_TAIL = 2000  # characters of a statement, and in which an unannounced answer is looked for
_UNIT = re.compile(UNIT)
_CALCULATOR = re.compile(r"<<[^<>\n]{0,200}>>")  # GSM8K's annotations
_NUMBER_ALONE = re.compile(r"(?:\\?\$)?[-+]?(?:\\?\$)?\d[\d.,/]*(?:\\?%)?")
_LINES_AFTER_MARKS = 2
_LINE = 400  # characters of a response that may be an answer as a whole
_LOOP_WINDOW, _LOOP_TIMES, _LOOP_CHARACTERS = 600, 4, 60


def boxed(text: str) -> str | None:
    """Content of the last complete `\\boxed{}` or `\\fbox{}`; boxes side by side are one list. Linear in the text."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    open_braces: list[tuple[int, int] | None] = []
    boxes: list[tuple[int, int, str]] = []
    for token in _BRACE.finditer(text):
        if token[0][0] == "\\" and token[0][1] in "{}":
            continue
        if token[0] == "}":
            start = open_braces.pop() if open_braces else None
            if start:
                while boxes and boxes[-1][0] > start[0]:
                    boxes.pop()  # it stood inside this one
                boxes.append((start[0], token.end(), text[start[1] : token.start()].strip()))
        else:
            open_braces.append((token.start(), token.end()) if token[0] != "{" else None)
    boxes = [box for box in boxes if box[2]]
    if not boxes:
        bare = _BARE_BOX.findall(text)
        return bare[-1] if bare else None
    contents = [boxes[-1][2]]
    for previous, box in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        if not _BETWEEN_BOXES.fullmatch(text, previous[1], box[0]):
            break
        if previous[2] != contents[-1]:
            contents.append(previous[2])
    return ", ".join(reversed(contents))


def tagged(text: str) -> str | None:
    """Content of the last closed `<answer>…</answer>`, None without one."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def after_thinking(text: str) -> str:
    """What follows the last `</think>`, or what heads gpt-oss's final words; everything when nothing does."""
    rest = _THOUGHT_ENDS.split(text)[-1]
    return rest if rest.strip() else text


def answer_part(text: str) -> tuple[str, bool]:
    """What follows the thoughts: the content of the last `<answer>` and True, else all of it and False."""
    text = after_thinking(text)
    inside = tagged(text)
    return (text, False) if inside is None else (inside, True)


def announced(text: str) -> str | None:
    """What follows the last "the answer is", "Answer:", "答案是" and the like up to the end of the sentence, or an "A:"
    line, half-width. One that is denied or refuted, supposed, or said by others is passed over.
    """
    return _announcement(half_width(text[-_REACH:]))[0]


def _announcement(text: str) -> tuple[str | None, str]:
    """The announced statement, and the text without the statements that are not the response's own."""
    last_line = text.rstrip().rpartition("\n")[2]
    if last_line.startswith("A:") and last_line[2:].strip():
        return last_line[2:].strip(), text
    for phrase in reversed(list(_ANNOUNCED.finditer(text))):
        statement, begin, end = _statement(text, phrase.end())
        refuted = _REFUTED.match(statement)
        before = text[: phrase.start()].rpartition("\n")[2][-_CLAUSE:]
        if refuted or statement.endswith("吗") or _DENIED.match(statement) or _REPORTED.search(before):
            text = text[: phrase.start()] + text[begin + refuted.end() if refuted else end :]
        elif re.search(r"[^\s.,:;*_]", statement):
            return statement, text
    for pattern in _CONCLUDED:
        for phrase in reversed(list(pattern.finditer(text))):
            statement, _, _ = _statement(text, phrase.end())
            if re.search(r"[A-Za-z0-9$]", statement):
                return statement, text
    return None, text


def _statement(text: str, start: int) -> tuple[str, int, int]:
    """The sentence from `start` on without bold marks, where it begins and ends; a formula may hold a full stop."""
    rest = text[start : start + _TAIL]
    begin = len(rest) - len(rest.lstrip())
    math = _MATH.match(rest, begin)
    end = _SENTENCE_END.search(rest, math.end() if math else begin)
    stop = end.start() if end else len(rest)
    statement = rest[begin:stop].lstrip(" *_\t")
    return statement.removesuffix("**").rstrip(" _\t"), start + stop - len(statement), start + stop


def after_marks(text: str) -> str | None:
    """What follows the last `####` (GSM8K's way to end a solution): a number alone on its line, or any text if at most
    two lines come after it, as `####` also makes a heading."""
    _, marks, rest = text.rpartition("####")
    statement, _, more = rest.strip().partition("\n")
    is_answer = more.count("\n") < _LINES_AFTER_MARKS or _NUMBER_ALONE.fullmatch(statement.strip())
    return statement.strip() or None if marks and is_answer else None


def final_answers(text: str) -> list[Answer]:
    """What may be meant as the final answer, the likeliest first; empty when there is none. Half-width.

    Announced ones, from the first of these that is there: `<answer>`, a box, `####` near the end, "the answer is".
    Otherwise the last formula or number, and the whole response if it is one line; but one that ends in a loop, with
    a question or inside a box has no answer.
    """
    text = half_width(_CALCULATOR.sub("", after_thinking(text))).strip()
    inside = tagged(text)
    scope = text if inside is None else inside
    box = boxed(scope)
    if box:
        return [Answer(box, True)]
    statement, rest = after_marks(scope), text
    if not statement:
        statement, rest = _announcement(scope[-_REACH:])
    statement = statement or inside
    if statement:
        return [Answer(t, True) for t in _with_its_expression(statement)]
    rest = rest.strip()
    if rest.endswith("?") or _OPEN_BOX.search(rest):
        return []
    if rest == text and "\n" not in text and 0 < len(text) <= _LINE:
        return [Answer(t, False) for t in _with_its_expression(text)]
    last = None if ends_in_a_loop(rest) else last_expression(rest)
    return [Answer(last, False)] if last else []


def _with_its_expression(text: str) -> list[str]:
    """The text; before it, if it is a sentence, the number that it starts with, or the formula or number at its end."""
    if text.endswith("!"):
        return [text, text.rstrip("!")]  # a factorial, or joy
    text = _AFTERTHOUGHT.split(text)[0]
    if not _PROSE.search(text) or ends_in_a_loop(text) or read_quantities(text):
        return [text]
    first = None if "=" in text else _LEADING.match(text)
    at_end = _FORMULA_AT_END.search(text) if re.search("[\u4e00-\u9fff]", text) and not first else None
    if at_end and re.search(r"\w", at_end[0]) and not DENIED_BEFORE.search(text[: at_end.start()]):
        return [at_end[0].strip(" ,;:"), text]
    last = first[0] if first else last_expression(text)
    return [last, text] if last else [text]


def last_expression(text: str) -> str | None:
    """The last formula between dollars or LaTeX brackets, or the last number, whichever ends later; with its unit, and
    with the list, the point or the interval that it ends; what the text says that it is not does not count."""
    text = text[-_TAIL:]
    formulas = list(_MATH.finditer(text))
    formula = formulas[-1] if formulas else None
    rest = text[formula.end() :] if formula else text
    number = last_number(rest)
    group = _GROUP_AT_END.search(rest) if number else None
    if group:
        return group[1]
    if not number:
        denied = formula and DENIED_BEFORE.search(text[: formula.start()])
        return _list_at_end(text, formulas) if formula and not denied else None
    start = rest.rfind(number[0])
    if start < 0:
        return number[0]
    denial = DENIED_BEFORE.search(rest[:start])
    if denial:
        return last_expression(rest[: denial.start()])
    unit = _UNIT.match(rest, start + len(number[0]))
    if _TERM.search(rest[:start]) or (not unit and re.match(r"[A-Za-z^]", rest[start + len(number[0]) :])):
        return None  # the 2 of 3x + 2, the 5 of 5xy
    others = _LIST_BEFORE.search(rest[max(start - _CLAUSE, 0) : start])
    return f"{others[0] if others else ''}{number[0]}{unit[0].rstrip() if unit else ''}"


def _list_at_end(text: str, formulas: Sequence[re.Match[str]]) -> str:
    """The last formula, or the list that ends with it: "$1$, $2$ and $3$", "$x=1$ or $x=2$"."""
    contents = [next(group for group in formula.groups() if group) for formula in formulas]
    joins = [text[a.end() : b.start()] for a, b in pairwise(formulas)]
    first = len(joins)
    while first and re.fullmatch(_JOIN, joins[first - 1]):
        first -= 1
    listed, words = contents[first:], "".join(joins[first:])
    is_list = re.search("or|或|还是", words) or (re.search("and|和|与", words) and "=" not in "".join(listed))
    return ", ".join(listed) if is_list else contents[-1]


def ends_in_a_loop(text: str) -> bool:
    """Whether the end of the text is one piece, of any length up to 150 characters, repeated four times or more."""
    tail = text.rstrip()[-_LOOP_WINDOW:]
    sizes = {period: max(_LOOP_CHARACTERS, _LOOP_TIMES * period) for period in range(1, len(tail) // _LOOP_TIMES + 1)}
    # What repeats a piece is the same when it is shifted by the piece's length.
    return any(size <= len(tail) and tail[-size:-period] == tail[period - size :] for period, size in sizes.items())
