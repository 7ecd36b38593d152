"""Where a response states its final answer, whatever the task."""

import re
from typing import NamedTuple

from valor.rewards.numerals import last_number


class Answer(NamedTuple):
    """A final answer as written. `stated` is False when nothing in the response announces it."""

    text: str
    stated: bool


_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*([^\s{}$\\]+)")
_BETWEEN_BOXES = re.compile(r"[\s$\\()\[\],;.]*(?:(?:and|or)[\s$\\()\[\]]*)?")
_ANNOUNCED = re.compile(
    r"\b(?:answers?|correct (?:option|choice))\b"
    r"(?:[^\n.:=]{0,60}?\b(?:is|are|equals|(?:would|should|must|will) be)\b[*_\s]*[:=]?|[*_\s]*[:=]|\*\*\s*\n)"
    r"|\u7b54\u6848[\u662f\u4e3a]?\s*[:\uff1a]?",  # "the answer is" in Chinese
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<!\bRs)[.?](?=[\s*\"')\]]|$)|\n|</")
_MATH = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PROSE = re.compile(r"(?<![\\A-Za-z])(?!(?:and|or|pi|sqrt|sin|cos|tan|log|ln|exp)\b)[A-Za-z]{2,}")
_GROUP_AT_END = re.compile(r"(?<![\w)])([(\[][^()\[\]\n=<>:]{1,80},[^()\[\]\n=<>:]{1,80}[)\]])[\s.*]*$")
_TERM = re.compile(r"(?<![A-Za-z])[a-z]\s*[-+*/^]\s*$")
_REACH = 10_000  # characters at the end in which "the answer is" counts
_LEADING = re.compile(r"(?:\\?\$)?-?\d[\d,.]*(?:/\d+)?(?:\s*\\?%)?(?=\s|$)|\$[^$]+\$")
_TAIL = 2000  # characters of a statement, and in which an unannounced answer is looked for
_CALCULATOR = re.compile(r"<<[^<>\n]{0,200}>>")  # GSM8K's annotations
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
    """What follows the last `</think>`; everything when nothing does."""
    rest = text.rpartition("</think>")[2]
    return rest if rest.strip() else text


def answer_part(text: str) -> tuple[str, bool]:
    """What follows the thoughts: the content of the last `<answer>` and True, else all of it and False."""
    text = after_thinking(text)
    inside = tagged(text)
    return (text, False) if inside is None else (inside, True)


def announced(text: str) -> str | None:
    """What follows the last "the answer is", "Answer:" and the like, up to the end of the sentence; or an "A:" line."""
    text = text[-_REACH:]
    last_line = text.rstrip().rpartition("\n")[2]
    if last_line.startswith("A:") and last_line[2:].strip():
        return last_line[2:].strip()
    for phrase in reversed(list(_ANNOUNCED.finditer(text))):
        rest = text[phrase.end() : phrase.end() + _TAIL].lstrip()
        math = _MATH.match(rest)
        start = math.end() if math else 0  # a formula may contain what looks like the end of a sentence
        end = _SENTENCE_END.search(rest, start)
        statement = rest[: end.start() if end else len(rest)].lstrip(" *_\t").removesuffix("**").rstrip(" _\t")
        if re.search(r"[^\s.,:;*_]", statement):
            return statement
    return None


def after_marks(text: str) -> str | None:
    """What follows the last `####` (GSM8K's way to end a solution), if it is on the last line but one or two."""
    _, marks, rest = text.rpartition("####")
    statement, _, more = rest.strip().partition("\n")
    return statement.strip() or None if marks and more.count("\n") < _LINES_AFTER_MARKS else None


def final_answers(text: str) -> list[Answer]:
    """What may be meant as the final answer, the likeliest first; empty when there is none.

    Announced ones, from the first of these that is there: `<answer>`, a box, `####` near the end, "the answer is".
    Otherwise the last formula or number, and the whole response if it is one line; but one that ends in a loop has no
    answer.
    """
    text = _CALCULATOR.sub("", after_thinking(text)).strip()
    inside = tagged(text)
    scope = text if inside is None else inside
    box = boxed(scope)
    if box:
        return [Answer(box, True)]
    statement = after_marks(scope) or announced(scope) or inside
    if statement:
        return [Answer(t, True) for t in _with_its_expression(statement)]
    if "\n" not in text and 0 < len(text) <= _LINE:
        return [Answer(t, False) for t in _with_its_expression(text)]
    last = None if ends_in_a_loop(text) else last_expression(text)
    return [Answer(last, False)] if last else []


def _with_its_expression(text: str) -> list[str]:
    """The text; before it, if it is a sentence, the number that it starts with, or the formula or number at its end."""
    if text.endswith("!"):
        return [text, text.rstrip("!")]  # a factorial, or joy
    if not _PROSE.search(text) or ends_in_a_loop(text):
        return [text]
    first = None if "=" in text else _LEADING.match(text)
    last = first[0] if first else last_expression(text)
    return [last, text] if last else [text]


def last_expression(text: str) -> str | None:
    """The last formula between dollars or LaTeX brackets, or the last number, whichever ends later; for a number in
    a point or an interval that ends the text, all of that."""
    text = text[-_TAIL:]
    formula = next(reversed(list(_MATH.finditer(text))), None)
    rest = text[formula.end() :] if formula else text
    number = last_number(rest)
    group = _GROUP_AT_END.search(rest) if number else None
    if group:
        return group[1]
    if number:
        start = rest.rfind(number[0])
        if start >= 0 and _TERM.search(rest[:start]):
            return None  # the 2 of 3x + 2
        percent = start >= 0 and re.match(r"\s*\\?%", rest[start + len(number[0]) :])
        return number[0] + ("%" if percent else "")
    return next((g for g in formula.groups() if g), None) if formula else None


def ends_in_a_loop(text: str) -> bool:
    """Whether the end of the text is one piece, of any length up to 150 characters, repeated four times or more."""
    tail = text.rstrip()[-_LOOP_WINDOW:]
    sizes = {period: max(_LOOP_CHARACTERS, _LOOP_TIMES * period) for period in range(1, len(tail) // _LOOP_TIMES + 1)}
    # What repeats a piece is the same when it is shifted by the piece's length.
    return any(size <= len(tail) and tail[-size:-period] == tail[period - size :] for period, size in sizes.items())
