"""Short answers to questions (NQ, TriviaQA, HotpotQA, 2Wiki …): exact match, F1, and agreement with people."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any

from valor.rewards.answers import answer_part
from valor.rewards.numerals import with_digits

_ARTICLES = frozenset(("a", "an", "the"))
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SUFFIXES = frozenset(("jr", "sr", "2", "3", "4"))
_ROMAN = "ii iii iv v vi vii viii ix x xi xii xiii xiv xv xvi"  # no i: that is a word
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
_SAME = {
    **{word: str(i) for i, word in enumerate(_ROMAN.split(), start=2)},
    **{word: str(i) for i, word in enumerate(_ORDINALS.split(), start=1)},
    **{"ltd": "limited", "inc": "incorporated", "corp": "corporation", "co": "company", "ave": "avenue", "mt": "mount"},
    **{"jan": "january", "feb": "february", "mar": "march", "apr": "april", "aug": "august", "sept": "september"},
    **{"sep": "september", "oct": "october", "nov": "november", "dec": "december"},
}
_NAME = re.compile(r"(?:[A-Z][\w.'-]*\s*){3,}")
_SLACK = 3  # words that may stand between those of the right answer
_SHORT = 8  # words of an answer that is compared by F1
_F1 = 0.6
MAX_LENGTH = 20_000  # characters of an answer; nobody reads further
_MAX_TRUTHS = 500
MAX_PRED = 200  # characters


def grade(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 when the answer says what one of the aliases says, as people judge it, else 0.

    The answer is what stands in `<answer>`, otherwise the whole response; docs/rewards.md says when it is right.
    Components: `em` and `f1` (SQuAD's), `contains`, `format` 1 with `<answer>`, `pred`.
    """
    answer, is_tagged = answer_part(solution_str)
    answer, truths = answer[:MAX_LENGTH], aliases(ground_truth)
    result = measures(answer, truths)
    plain, words = normalize(answer), content_words(answer)
    right = result["em"] or any(says(plain, words, truth) for truth in truths)
    return {"score": float(right), **result, "format": float(is_tagged), "pred": plain[:MAX_PRED]}


def aliases(ground_truth: Any) -> list[str]:
    """The acceptable answers: a text, a list, Search-R1's {"target": …} or TriviaQA's {"value": …, "aliases": …}.

    Raises ValueError when there is none.
    """
    if isinstance(ground_truth, Mapping):
        values = [ground_truth.get(key) for key in ("target", "value", "aliases", "answer", "answers", "text")]
    else:
        values = [ground_truth]
    found: list[str] = []
    for value in values:
        value = getattr(value, "tolist", lambda v=value: v)()  # an array from a parquet file
        found += [str(v) for v in (value if isinstance(value, list | tuple) else [value]) if v is not None]
    found = [text for text in dict.fromkeys(found) if text.strip()]
    if not found:
        raise ValueError(f"the ground truth has no answer: {str(ground_truth)[:60]!r}")
    return found[:_MAX_TRUTHS]


def normalize(text: str) -> str:
    """SQuAD's: lower case, no punctuation, no articles, single spaces."""
    return " ".join(word for word in text.lower().translate(_PUNCTUATION).split() if word not in _ARTICLES)


def f1_score(answer: list[str], truth: list[str]) -> float:
    """Harmonic mean of precision and recall of words."""
    common = (Counter(answer) & Counter(truth)).total()
    return 2 * common / (len(answer) + len(truth)) if common else 0.0


def says(plain: str, words: list[str], truth: str) -> bool:
    """Whether a person would find the truth in an answer, given normalized and as content words."""
    in_full, truth = truth, re.sub(r" \([^()]*\)$", "", truth)  # "Nash (mathematician)"
    wanted = content_words(truth)
    if not wanted:
        return False
    if wanted in (["yes"], ["no"]):
        return next(([word] for word in words if word in ("yes", "no")), None) == wanted
    if _contains(plain, normalize(in_full)) or _stand_together(words, wanted, _SLACK):
        return True
    if len(words) <= _SHORT and f1_score(words, wanted) >= _F1:
        return True
    family = [word for word in wanted[1:] if word not in _SUFFIXES]
    is_name = len(wanted) > 2 and bool(family) and bool(_NAME.fullmatch(truth))
    return is_name and _stand_together(words, [wanted[0], family[-1]], 2)


def measures(answer: str, truths: list[str]) -> dict[str, Any]:
    """`em`, `f1` and `contains` of an answer: the best over the truths."""
    plain, wanted = normalized(answer), [normalized(truth) for truth in truths]
    words = plain.split()
    return {
        "em": float(plain in wanted),
        "f1": max(f1_score(words, truth.split()) for truth in wanted),
        "contains": float(any(_contains(plain, truth) for truth in wanted)),
    }


def normalized(text: str) -> str:
    """As SQuAD does it; but what that leaves nothing of (The The, "+") stays, or an empty answer would be equal."""
    return normalize(text) or " ".join(text.lower().split())


def _contains(text: str, truth: str) -> bool:
    # Four letters or fewer are too often part of another word.
    return truth in text if len(truth) > 4 else bool(truth) and f" {truth} " in f" {text} "


def _stand_together(words: list[str], wanted: list[str], slack: int) -> bool:
    """Whether some stretch of the words, `slack` longer than what is wanted, has all of it."""
    need, size = Counter(wanted), len(wanted) + slack
    found = (need <= Counter(words[i : i + size]) for i in range(len(words)))
    return need.keys() <= set(words) and any(found)


def content_words(text: str) -> list[str]:
    """Words for comparison: no accents, plurals, possessives, articles; numbers as digits."""
    text = unicodedata.normalize("NFKD", text).lower().replace("&", " and ").replace("\u2019", "'")
    text = "".join(c for c in text if not unicodedata.combining(c))
    text = re.sub(r"(?<=\d),(?=\d{3})|'s?\b|(?<=\d)(?:st|nd|rd|th)\b|(?<=[a-z]{4})\d+\b|(?<=\d)\.0\b", "", text)
    text = re.sub(r"\b(?:[a-z]\.){2,}", lambda m: m[0].replace(".", ""), text)  # u.s.
    text = re.sub(r"\b(\w*(?:met|lit|cent|theat))re(s?)\b", r"\1er\2", text)
    found = re.findall(r"\d+(?:\.\d+)?|\w+", with_digits(text))
    return [_SAME.get(word) or _singular(word) for word in found if word not in _ARTICLES]


def _singular(word: str) -> str:
    if len(word) > 5 and word.endswith("es"):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
