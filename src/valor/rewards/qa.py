"""Short answers to questions (NQ, TriviaQA, HotpotQA, 2Wiki …): exact match of the one answer that is given."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any

from valor.rewards.answers import NOT, WRONG, announced, answer_part, boxed
from valor.rewards.numerals import half_width, with_digits

_ARTICLES = frozenset(("a", "an", "the"))
_PUNCTUATION = str.maketrans("", "", string.punctuation + "\u201c\u201d\u2018\u2019《》〈〉「」『』【】·…—")
_HAN = r"\u3400-\u9fff"
_BETWEEN_HAN = re.compile(rf"(?<=[{_HAN}])\s+(?=[{_HAN}])")
_TOKEN = re.compile(rf"[{_HAN}]|[^\s{_HAN}]+")  # Chinese is compared by characters
_ROMAN = "ii iii iv v vi vii viii ix x xi xii xiii xiv xv xvi"  # no i: that is a word
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
_MONTHS = {
    *("january", "february", "march", "april", "may", "june", "july", "august"),
    *("september", "october", "november", "december"),
}
_SAME = {
    **{word: str(i) for i, word in enumerate(_ROMAN.split(), start=2)},
    **{word: str(i) for i, word in enumerate(_ORDINALS.split(), start=1)},
    **{"ltd": "limited", "inc": "incorporated", "corp": "corporation", "co": "company", "ave": "avenue", "mt": "mount"},
    **{month[:3]: month for month in _MONTHS},
    "sept": "september",
}
# A sentence around an answer: a subject, a verb, what is said of it; and where that ends.
_LEAD = re.compile(
    r"(?:\W|(?:well|so|thus|therefore|hence|yes|no|i (?:think|believe|guess)(?: that)?)\b|所以|因此|我认为|我觉得)*",
    re.IGNORECASE,
)
_STATEMENT = re.compile(
    r"(.*?)(?:(?<=[Ii]t)['\u2019]s\b|\b(?:is|was|are|were|has|have|had|has been|must be)\b|:\s"
    r"|(?<![不非])[是为](?!否)|叫做?|位于)\s*"
    r"(?:(?:also|probably|currently|usually|originally|approximately|about)\s)*(.+)"
)
_PASSIVE = re.compile(r"(?:[a-z-]+ ){0,4}?(?:in|by|on|at|to be|to|as|from|called|named) (.+)")
_NAMELESS = re.compile(
    r"\W*(?:(?:[Tt]he|[Aa]n?|[IiTt]t|[Tt]h(?:is|at|ey|ere)|[Ss]?[Hh]e|[Ww]ho|[Ww]hich)\b|[a-z]|$)|.*[的最]|[答它他她这那]"
)
_DESCRIBED = re.compile(r"(?:the|an?|one of|considered)\b|.*[的最]|世界|首")
_END = re.compile(r"(?<!\b[A-Z])(?<!\b(?:Dr|St|Mr|Jr|Ms))[.!?](?=[\s\"'\u201d)]|$)|[;\n]")
_BEFORE_NAME = re.compile(
    r"(?:The |An? )?(?:(?!(?:of|not|never|nor) )[a-z-]+ )+(?=\W?[A-Z])|(?:about|around|approximately|exactly) "
)
_IN_BRACKETS = re.compile(r" ?\([^()]*\)$")  # Nash (mathematician)
_QUESTION = re.compile(r"[^.!?\n]*\?")
_SUFFIXES = frozenset(("jr", "sr", "2", "3", "4"))
_NAME = re.compile(r"(?:[A-Z][\w.'-]*\s*){3,}")
_CONCLUSION = re.compile(r"(?:^|[.!?\n]\s*)(?:so|thus|therefore|hence|所以|因此|综上)\b", re.IGNORECASE)
_ASIDE = re.compile(
    r"\s\(|, (?:an?|the|who|which|where|in|on|at)\b|\s(?:in|for|on|at|from|when|during|who|after|since|while)\b"
)
_DENIED = rf"(?:{NOT}(?: (?!but |rather )\w+){{0,4}}? ?|(?:{NOT}|[不非没])[{_HAN}]{{0,3}})"
_REFUTED = rf"(?: (?:is|was) (?:\w+ )?(?:not|{WRONG})\b|不对|不是|是?错)"
_GRAMMAR = re.compile(
    r"\b(?:is|was|are|were|be|been|has|had|have|in|on|at|by|of|to|for|from|as|it|that|but|called|his|her|its|their)\b"
    r"|['\u2019]s \w|[是为在的叫于]"
)
_JOINS = re.compile(rf"\b(?:and|or)\b|[和或与]|还是|(?<=[{_HAN}x]), (?=[{_HAN}x])")
_LIST = 3  # words beside an answer that make a list of it where no grammar joins them
_SLACK = 3  # words that may stand between those of the right answer
_SHORT, _F1 = 8, 0.6  # words of a text that mentions a truth by sharing so much with it
_SENTENCE = 400  # characters of a sentence that may frame an answer
MAX_LENGTH = 20_000  # characters of an answer; nobody reads further
_MAX_TRUTHS = 500
MAX_PRED = 200  # characters
_MATCHES = ("exact", "f1", "contains")


def grade(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 when the answer is one of the aliases, else 0; `extra_info["match"]` asks for "f1" or "contains" instead.

    The answer is what stands in `<answer>` or a box, is announced, or is the first sentence; docs/rewards.md says when
    it is an alias. Components: `em` and `f1` (SQuAD's), `contains`, `format` 1 with `<answer>`, `pred`.
    """
    match = (extra_info or {}).get("match") or "exact"
    if match not in _MATCHES:
        raise ValueError(f"extra_info has match={match!r:.40}: it is one of {', '.join(_MATCHES)}")
    part, is_tagged = answer_part(solution_str)
    answer = half_width(part[:MAX_LENGTH])
    answer, truths = (boxed(answer) or announced(answer) or answer).strip(), aliases(ground_truth)
    phrase = answer_phrase(answer)
    result = measures(answer, truths)
    meant = [truth for truth in truths if not is_denied(answer, truth)]
    if match == "exact":
        score = float(any(agrees(text, truth) for truth in meant for text in (answer, phrase)))
    else:
        stated = _QUESTION.sub("", answer)
        meant = [truth for truth in meant if not is_listed(stated, truth)]
        scores = [measures(stated, [t])["f1"] if match == "f1" else mentions(stated, t) for t in meant]
        score = float(max(scores, default=0.0))
    return {"score": score, **result, "format": float(is_tagged), "pred": normalize(phrase)[:MAX_PRED]}


def aliases(ground_truth: Any) -> list[str]:
    """The acceptable answers: a text, a list, Search-R1's {"target": …} or TriviaQA's {"value": …, "aliases": …}.

    Raises ValueError when there is none.
    """
    values = [ground_truth]
    if isinstance(ground_truth, Mapping):
        values = [ground_truth.get(key) for key in ("target", "value", "aliases", "answer", "answers", "text")]
    texts: list[str] = []
    for value in values:
        value = getattr(value, "tolist", lambda v=value: v)()  # an array from a parquet file
        texts += [str(v) for v in (value if isinstance(value, list | tuple) else [value]) if v is not None]
    texts = [text for text in dict.fromkeys(texts) if text.strip()]
    if not texts:
        raise ValueError(f"the ground truth has no answer: {str(ground_truth)[:60]!r}")
    return texts[:_MAX_TRUTHS]


def normalize(text: str) -> str:
    """SQuAD's: lower case, no punctuation, no articles, single spaces; Chinese half-width and without spaces."""
    words = half_width(text).lower().translate(_PUNCTUATION).split()
    return _BETWEEN_HAN.sub("", " ".join(word for word in words if word not in _ARTICLES))


def f1_score(answer: list[str], truth: list[str]) -> float:
    """Harmonic mean of precision and recall of words."""
    common = (Counter(answer) & Counter(truth)).total()
    return 2 * common / (len(answer) + len(truth)) if common else 0.0


def answer_phrase(text: str) -> str:
    """What the first sentence of an answer names: "It is Paris in France." and "Paris was the capital." name Paris.

    One side of the verb alone is read, or two guesses would fit into a sentence.
    """
    concluded = list(_CONCLUSION.finditer(text))
    text = text[concluded[-1].start() :] if concluded else text
    text = text[_LEAD.match(text).end() :]  # type: ignore[union-attr]  # matches everywhere
    end = _END.search(text)
    if end and end[0] == "?":
        return ""
    sentence = text[: end.start() if end else None].strip().rstrip("吧呢啊")
    parts = _STATEMENT.match(sentence) if len(sentence) <= _SENTENCE else None
    if parts is None:
        return sentence
    subject, rest = parts[1].strip(" ,"), parts[2]
    if not _NAMELESS.match(subject) and _DESCRIBED.match(rest):
        return subject
    passive = _PASSIVE.match(rest)
    rest = passive[1] if passive else rest
    aside = _ASIDE.search(rest)
    return rest[: aside.start() if aside else None]


def agrees(text: str, truth: str) -> bool:
    """Whether two names, dates or numbers are the same but for spelling: accents, plurals, number words, middle names,
    a description before a name."""
    readings = [content_words(_BEFORE_NAME.sub("", text, count=1)), content_words(text)]
    without = _IN_BRACKETS.sub("", truth)
    for written in dict.fromkeys((truth, without, _BEFORE_NAME.sub("", without, count=1))):
        wanted = content_words(written)
        if not wanted:  # The The, "+"
            if normalized(text) == normalized(written):
                return True
            continue
        if wanted in (["yes"], ["no"]):
            return next(([word] for word in readings[-1] if word in ("yes", "no")), None) == wanted
        forms = [wanted, [wanted[0], wanted[-1]]] if _NAME.fullmatch(written) else [wanted]
        is_date = not _MONTHS.isdisjoint(wanted)
        if any(words in forms or (is_date and sorted(words) == sorted(wanted)) for words in readings):
            return True
    return False


def mentions(text: str, truth: str) -> bool:
    """Whether a person would find the truth in a text: its words close together, its first and last name, or in a short
    text most of its words and all of its numbers."""
    words, written = content_words(text), _IN_BRACKETS.sub("", truth)
    wanted = content_words(written)
    if agrees(text, truth) or not wanted or wanted in (["yes"], ["no"]):
        return agrees(text, truth)
    if _contains(normalize(text), normalize(truth)) or _stand_together(words, wanted, _SLACK):
        return True
    numbers, others = ([word for word in group if word.isdigit()] for group in (words, wanted))
    if len(words) <= _SHORT and numbers == others and f1_score(words, wanted) >= _F1:
        return True
    family = [word for word in wanted[1:] if word not in _SUFFIXES]
    return bool(family and _NAME.fullmatch(written)) and _stand_together(words, [wanted[0], family[-1]], 2)


def _stand_together(words: list[str], wanted: list[str], slack: int) -> bool:
    """Whether some stretch of the words, `slack` longer than what is wanted, has all of it."""
    need, size = Counter(wanted), len(wanted) + slack
    stretches = (Counter(words[i : i + size]) for i in range(len(words)))
    return need.keys() <= set(words) and any(need <= stretch for stretch in stretches)


def is_denied(text: str, truth: str) -> bool:
    """Whether every mention of the truth is negated or called wrong."""
    plain, name = normalize(re.sub(r"n['\u2019]t\b", " not", text)), re.escape(normalize(truth))
    mentions, denials = re.findall(name, plain), re.findall(f"{_DENIED}{name}|{name}{_REFUTED}", plain)
    return 0 < len(mentions) <= len(denials)


def is_listed(text: str, truth: str) -> bool:
    """Whether the truth is one of several names that nothing joins to a sentence."""
    if agrees(text, truth) or ":" in text or _GRAMMAR.search(text.lower()):
        return False
    rest = re.sub(re.escape(truth), "", text, flags=re.IGNORECASE)
    more = len(text.split()) - len(truth.split())
    return more >= _LIST or rest.count(",") > 1 or _JOINS.search(text.replace(truth, "x")) is not None


def measures(answer: str, truths: list[str]) -> dict[str, Any]:
    """`em`, `f1` and `contains` of an answer: the best over the truths."""
    plain, wanted = normalized(answer), [normalized(truth) for truth in truths]
    words = _TOKEN.findall(plain)
    return {
        "em": float(plain in wanted),
        "f1": max(f1_score(words, _TOKEN.findall(truth)) for truth in wanted),
        "contains": float(any(_contains(plain, truth) for truth in wanted)),
    }


def normalized(text: str) -> str:
    """As SQuAD does it; but what that leaves nothing of (The The, "+") stays, or an empty answer would be equal."""
    return normalize(text) or " ".join(text.lower().split())


def _contains(text: str, truth: str) -> bool:
    # Four letters or fewer are too often part of another word; Chinese has no spaces between words.
    is_word = len(truth) > 4 or re.search(f"[{_HAN}]", truth)
    return truth in text if is_word else bool(truth) and f" {truth} " in f" {text} "


def content_words(text: str) -> list[str]:
    """Words for comparison: no accents, plurals, possessives, articles; numbers as digits."""
    text = (
        unicodedata.normalize("NFKD", half_width(text))
        .lower()
        .replace("&", " and ")
        .replace("\u2019", "'")
        .replace("%", " percent")
    )
    text = "".join(c for c in text if not unicodedata.combining(c))
    text = re.sub(r"(?<=\d),(?=\d{3})|'s?\b|(?<=\d)(?:st|nd|rd|th)\b|(?<=[a-z]{4})\d+\b|(?<=\d)\.0\b", "", text)
    text = re.sub(r"\b(?:[a-z]\. ?){2,}", lambda m: re.sub("[. ]", "", m[0]) + " ", text)  # u.s., j. k.
    text = re.sub(r"\b(\w*(?:met|lit|cent|theat))re(s?)\b", r"\1er\2", text)
    words = re.findall(rf"\d+(?:\.\d+)?|[{_HAN}]|[^\W{_HAN}]+", with_digits(text))
    return [_SAME.get(word) or _singular(word) for word in words if word not in _ARTICLES]


def _singular(word: str) -> str:
    if len(word) > 5 and word.endswith("es"):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
