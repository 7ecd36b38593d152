"""The score in a judge's reply: it stands on a line of its own, and the last such line counts."""

import re
import unicodedata

_DASHES = str.maketrans("\u2212\u2013\u2014", "---")
_MARKS = re.compile(r"[*_`#|\"'~]+|\\boxed(?=\{)|\$")
_LABEL = (
    r"(?:(?:my|the|final|overall|total|numeric|numerical|最终|最后|综合|总体|我的|的|本题)\s*){0,4}"
    r"(?:score|rating|grade|mark|verdict|评分|得分|分数|打分|总分)(?:\s*\([^()\n]{0,30}\))?"
)
_NUMBER = r"([-+]?\s?(?:\d+(?:\.\d+)?|\.\d+))"
_MOST = (
    r"\s*(?:分|points?)?\s*(?:(?:/|out\s+of|of|\(满分)\s*(\d+(?:\.\d+)?)\s*(?:分|points?)?\)?|(%))?\s*(?:分|points?)?"
)
_BETWEEN = r"(?:\s*(?:[:=]|\bis\b|\bof\b|[是为])\s*:?\s*|\s+-\s+|\s+)"
_VERDICT = re.compile(
    rf"[\s>{{(\[\-]*(?:{_LABEL}{_BETWEEN}[\s({{\[]*{_NUMBER}|\[\[\s*{_NUMBER}|\{{\s*{_NUMBER}){_MOST}[\s)}}\]]*",
    re.IGNORECASE,
)
_LABEL_LINE = re.compile(rf"^([ \t]*{_LABEL}[ \t]*:?)[ \t]*\n\s*(?=[-+\[]*\d)", re.IGNORECASE | re.MULTILINE)
_COMMENT = re.compile(r"$|[.。;!]|,(?!\s*\d)|-\s|\(")  # what may follow a verdict on its line
_SENTENCE = re.compile(r"(?<=[.!?。!?;])\s*|[{,]\s*(?=score\b)", re.IGNORECASE)


def without_thoughts(reply: str) -> str:
    """What a reply says behind its thoughts; nothing where these never end."""
    return reply.rpartition("</think>")[2].partition("<think>")[0]


def read_verdict(reply: str, highest: float) -> float | None:
    """The score that a reply ends with: "Score: -3", "**Rating:** 7", "评分：7", "[[7]]"; None without one.

    The last line that begins with a verdict counts, else a verdict that is the last sentence. "7/10" and "70%" are
    parts of `highest`.
    """
    text = _MARKS.sub("", unicodedata.normalize("NFKC", reply).translate(_DASHES))
    lines = [line.strip() for line in _LABEL_LINE.sub(r"\1 ", text).splitlines() if line.strip()]
    for line in reversed(lines):
        match = _VERDICT.match(line)
        if match and _COMMENT.match(line, match.end()) and not line.endswith("?"):
            last = _last_sentence(line, highest)
            return _value(match, highest) if last is None else last
    return _last_sentence(lines[-1], highest) if lines else None


def _last_sentence(line: str, highest: float) -> float | None:
    parts = [part for part in _SENTENCE.split(line) if part.strip(" .。!")]
    match = _VERDICT.fullmatch(parts[-1].strip(" .。!")) if parts else None
    return _value(match, highest) if match else None


def _value(match: re.Match[str], highest: float) -> float:
    *numbers, most, percent = match.groups()
    score = float("".join(next(number for number in numbers if number is not None).split()))
    scale = 100.0 if percent else float(most) if most else highest
    return score if scale == highest or not scale else score * highest / scale
