"""What formulas say of their letters at their end: general solutions ("2k\\pi, k \\in Z"), domains ("y^2=4x (x>0)")."""

import re

_INTEGERS = [
    re.compile(
        r"[ ,;:]*(?:\\text ?\{[^{}]*\} ?)?[(\[]? ?(?P<name>[a-z]) ?\\in ?\\mathbb ?\{? ?(?P<set>[ZN]) ?\}? ?"
        r"(?P<positive>(?:[\^_] ?\{? ?\\?(?:[*+]|ast) ?\}? ?)*)[)\]]?$"
    ),
    re.compile(  # for any integer k
        r"[ ,;:]*(?:\\text ?\{ ?)?(?:(?:for|where|with|any|some|all|each|every|an?) )*(?P<positive>positive )?"
        r"(?P<set>)integers? ?\}? ?(?P<name>[a-z]) ?\)?$"
    ),
    re.compile(  # k is an integer
        r"[ ,;:]*(?:\\text ?\{ ?(?:for|where|with|其中) ?\})? ?\(?(?<![A-Za-z\\])(?P<name>[a-z]) ?(?:\\text ?\{ ?)?"
        r"(?:(?:is|an?|any|为|是|任意) ?)*(?P<positive>positive |正)?(?P<set>)(?:integer|整数) ?\}? ?\)?$"
    ),
]
_RELATION = r"(?:[<>]|\\(?:leq?|geq?|neq?)(?:slant)?(?![a-z]))"
_DOMAIN = re.compile(
    r"(?:[ ,;]*\(| ?[,;] ?|[ ,;]*\\text ?\{ ?(?:for|where|when|if|with|其中|当) ?\}) ?"
    rf"(?P<domain>(?:[^(),;=<>a-z]*{_RELATION} ?)?(?P<name>[a-z]) ?"
    rf"(?:{_RELATION}[^(),;=]*|\\in ?[(\[][^()\[\]]*[)\]]))\)?$"
)


def of_one_parameter(truth: str, answer: str) -> tuple[str, str]:
    """Both formulas without what they say of an integer, in the truth's letter for it, and without their domains.

    Unchanged where both say which integers they are of, and these differ. One that says nothing is of the other's. A
    domain goes where both say the same, and where only the answer names one.
    """
    first, second = map(_integer, (truth, answer))
    if first and second and _kind(first) != _kind(second):
        return truth, answer
    truth, answer = (text[: match.start()] if match else text for text, match in ((truth, first), (answer, second)))
    if first and second:
        letter = first["name"]
        answer = re.sub(rf"(\\[A-Za-z]+)|{second['name']}", lambda m: m[1] or letter, answer)
    first, second = map(_domain, (truth, answer))
    if second and (first is None or _spelling(first["domain"]) == _spelling(second["domain"])):
        truth, answer = truth[: first.start()] if first else truth, answer[: second.start()]
    return truth, answer


def _integer(text: str) -> re.Match[str] | None:
    matches = (pattern.search(text) for pattern in _INTEGERS)
    return next((match for match in matches if match and match.start()), None)


def _kind(integer: re.Match[str]) -> str:
    return "positive" if integer["positive"] else integer["set"] or "Z"


def _domain(text: str) -> re.Match[str] | None:
    """The end of a formula, not itself an inequality, that restricts one of its letters."""
    match = _DOMAIN.search(text)
    formula = text[: match.start()] if match else ""
    restricts = match and match["name"] in re.sub(r"\\[A-Za-z]+", "", formula)
    return match if restricts and not re.search(rf"{_RELATION}|\\in(?![a-z])", formula) else None


def _spelling(domain: str) -> str:
    return re.sub(r"(\\[lgn]e)q?(?:slant)?|\s+", lambda m: m[1] or "", domain)
