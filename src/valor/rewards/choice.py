"""Multiple choice (MMLU, GPQA, ARC, HellaSwag …): the letter, the letter in brackets, or the text of the option."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from valor.rewards.answers import NOT, WRONG, announced, answer_part, boxed
from valor.rewards.numerals import half_width
from valor.rewards.qa import normalize

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DEFAULT_CHOICES = 10
_TAIL = 1500  # characters in which a choice is looked for
_QUOTED = re.compile(r"^\W{0,4}([A-Z])[.):]\s+\S.*$", re.MULTILINE)  # an option as the question has it


def _any(words: str) -> str:
    return f"(?:{'|'.join(words.split())})"


# The letter of an option: A is an article and I a pronoun where a word follows that says nothing of a letter.
_SAYS = _any(
    "is isn't was are and or but because since as seems looks fits works matches must can can't cannot could would "
    "should may might does doesn't has then over instead which for given too also if only holds it"
)
_LETTER = (
    r"(?:[(\[][A-Za-z][)\]]|(?<![A-Za-z0-9_'\u2019+.$%-])(?:[B-HJ-Z]"
    rf"|A(?!['\u2019]|\s+(?!{_SAYS}\b|[A-Z]\b)[A-Za-z])|I(?=\s*(?:[,.;:!?)*]|$|(?:and|or|is)\b)))(?![A-Za-z0-9_'\u2019+-]))"
)
_JOINED = r"(?:,\s*(?:and|or)|[,/&]|and|or|nor|和|与|或者?|及|以及|(?=\s))\s*(?:option\s+)?"
_GROUP = re.compile(
    rf"(?:\b{_any('options? choices? answers? statements? letters?')}\s+|选项)?{_LETTER}(?:\s*{_JOINED}{_LETTER})*"
    r"(?!\s*(?:major|minor)\b)"
)
_LONE = re.compile(r"\W*(?:(?:the )?(?:answer|option|choice|letter)\s*(?:is|[:=])?\s*)?([a-z])\W*", re.IGNORECASE)
_LOWER = re.compile(r"(?:(?<=nswer: )|(?<=nswer is )|(?<=ption )|(?<=hoice ))[a-z](?=\)?(?:[.,;:\n]|$))")
_IN_QUOTES = re.compile(r"['\"`\u2018\u201c]([A-Za-z])['\"`\u2019\u201d]")
_NO_OPTION = re.compile(rf"\b{_any('vitamin hepatitis type grade plan group class point figure table part')}\s+$", re.I)
_BOUNDARY = re.compile(
    r"[.;!?\n]+(?=\s|$|[\u3400-\u9fff])|(?<=[\u3400-\u9fff])[.;!?]|[\u2013\u2014]"
    r"|,(?!\s*(?:and\s+|or\s+)?[(\[]?[A-HJ-Z]\b)|,(?=\s*(?:and\s+|or\s+)?[(\[]?[A-Z][)\]]?\s+(?:is|isn't|was)\b)"
    rf"|\b{_any('but however because since although though while whereas so therefore thus hence over')}\b"
    r"|\b(?:rather than|instead of)\b|而是|但是?|因为|所以|因此|故(?!选)|而(?!非)"
)
_CORRECTION = re.compile(
    rf"\b{_any('wait no nope actually correction rather instead but however sorry reconsider')}\b"
    r"|\bon (?:reflection|second thought)\b|^\W*哦?不\W*$|不对|更正|其实|等等|而是|但|改选|改为|应该是",
    re.IGNORECASE,
)
_NOT_BEFORE = re.compile(
    rf"{NOT}|\b(?:(?<!no )doubt|dismiss|eliminat|exclud|reject|discard|(?:rul|cross)\w* out\b)"
    r"|不[认觉选能应会可为]|否定",
    re.IGNORECASE,
)
# Between a letter and what is said of it.
_VERB = (
    rf"\s*(?:[)*:]\s*)?(?:{_any('is are was were be seems? looks? must would can has to appears')}\s+)*"
    r"(?:(?:the|an?|all|both|also|just|only|likely|[a-z]+ly)\s+)*"
)
_CHINESE_VERB = r"\s*(?:这个)?(?:选?项)?(?:显然|明显|都|均|也|才|是|的说法|说法|为)*"
_NOT_AFTER = re.compile(
    rf"{_VERB}(?:not?\b(?! (?:{WRONG}|ruled))|{WRONG}|(?:ruled )?out\b|too\b|eliminated|excluded|distractor"
    r"|impossible|unlikely|irrelevant|implausible|invalid)"
    rf"|\s*(?:(?:is|are|was|were|could|does|do|ca|wo|would)n['\u2019]t|cannot|(?:can|could|does|do) not|fails"
    rf"|contradicts)\b"
    rf"|{_CHINESE_VERB}(?:错|不|有误|被?排除|无关|并非)|\s*[\u2717\u274c]",
    re.IGNORECASE,
)
_RIGHT_AFTER = re.compile(
    rf"{_VERB}(?:\w+\s+)?{_any('correct right best true answer accurate choice valid')}|\s*[\u2713\u2705]"
    r"|\s*(?:it is|fits|matches|works|wins|holds|makes (?:the most |more )?sense|is the (?:one|only)"
    r"|as (?:the|my) (?:\w+ )?(?:answer|choice|option))\b"
    rf"|{_CHINESE_VERB}(?:正确|对|符合|成立|答案|最?合适|最佳)|才是",
    re.IGNORECASE,
)
_ANNOUNCED = re.compile(
    rf"\b{_any('answers? correct right best final choose chose chosen pick select selected meant')}\b"
    r"|\b(?:go with|going with|went with|opt for|opting for|settle on|vote for)\b|答案|选|答",
    re.IGNORECASE,
)
# A letter right behind one of these is only talked about, and not chosen.
_MENTIONED = re.compile(
    rf"\b(?:{_any('if of at by over like about among between try says said')}"
    r"|(?:consider|compar|look|check|test)[a-z]*)\b\W*(?:\w+\W+)?$|(?:看|比较?|若|如果)[\u4e00-\u9fff]?$",
    re.IGNORECASE,
)
_GAP = re.compile(r"(?:\W*\w+){0,6}\W*|(?:\W*[\u4e00-\u9fff]){0,12}\W*")
_BARE_AFTER = re.compile(
    rf"(?:\W|\b{_any('is it i think believe guess for sure definitely probably instead please option choice only')}\b"
    r"|选?项|吧|了)*",
    re.IGNORECASE,
)
_LABELLED = re.compile(r"(?:\\text\w*\s*\{)?\(([A-Z])\)\}?((?:(?!\([A-Z]\))[^\n?])+)")  # (B) iron oxide
_AND_LETTER = r"(?:[\s,;()&*${}]|\band\b|和)*[A-Z]"
_TWO = "?"  # more than one option was named


class _Clause(NamedTuple):
    """What a clause says: letters that it denies, and letters that it chooses. `rank` 3: announced as the answer, 2:
    called right, 1: merely named. `corrects`: it takes back what was said before."""

    denied: set[str]
    chosen: set[str]
    rank: int
    corrects: bool


def grade(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 when the option that the response chooses in the end is the right one, else 0; naming two is no choice,
    but where the ground truth is several letters (ABD), just these, in any order.

    docs/rewards.md says how the ground truth and the options are written.
    Components: `format` 1 when the choice is announced ("Answer: B", a box, `<answer>`), `pred` the letter.
    """
    options = _options((extra_info or {}).get("choices"))
    several = _several_letters(ground_truth, options)
    right = several or _right_letter(ground_truth, options)
    scope, is_tagged = answer_part(solution_str)
    box = boxed(scope)
    text = box or scope[-_TAIL:]
    letter = _chosen_letters(half_width(text)) if several else _choice(text, options)
    is_announced = bool(letter) and (is_tagged or box is not None or announced(text) is not None)
    return {"score": float(letter == right), "format": float(is_announced), "pred": letter.replace(_TWO, "")}


def _several_letters(truth: Any, options: Mapping[str, str]) -> str:
    """The letters of a ground truth that names more than one, in order: "ABD", "A, B", ["A", "B"]; "" for others."""
    text = half_width("".join(map(str, truth)) if isinstance(truth, list | tuple) else str(truth))
    letters = re.sub(r"[\s,;]", "", text)
    is_several = re.fullmatch("[A-Z]{2,}", letters) and sorted(set(letters)) == list(letters)
    return letters if is_several and text not in options.values() and {*letters} <= {*(options or LETTERS)} else ""


def _chosen_letters(text: str) -> str:
    """The letters that an announcement, a box or the last line begins with, in order."""
    statement = (announced(text) or text.strip().rpartition("\n")[2]).replace("\\text", "")
    match = re.match(rf"\W*(?:options?\b|选项)?\W*([A-Z](?:{_AND_LETTER})*)(?![A-Za-z])", statement)
    return "".join(sorted(set(re.findall("[A-Z]", match[1])))) if match else ""


def _choice(text: str, options: Mapping[str, str]) -> str:
    """The letter of the option that a text chooses, "" for none."""
    text = half_width(text).replace("$", "").replace("**", "").strip()
    text = _IN_QUOTES.sub(r"(\1)", text)
    text = _LOWER.sub(lambda match: match[0].upper(), text)
    lone = _LONE.fullmatch(text)
    if lone:
        return lone[1].upper() if lone[1].upper() in (options or LETTERS) else ""
    has_options = len({match[1] for match in _QUOTED.finditer(text)}) > 1
    text = _QUOTED.sub(lambda line: _as_verdict(line, has_options), text).strip()
    letter = _last_verdict(text, options) or (_last_verdict(_with_letters(text, options), options) if options else "")
    labelled = _LABELLED.fullmatch(text)
    is_label = labelled and labelled[1] in (options or LETTERS) and not _NOT_AFTER.match(labelled[2])
    return letter or (labelled[1] if labelled and is_label else "")


def _as_verdict(line: re.Match[str], is_quoted: bool) -> str:
    """A line like an option of the question as a clause, when it says that the option is right or wrong; nothing of
    several that only repeat the question."""
    rest = line[0].lstrip()[2:]
    judged = _NOT_AFTER.match(rest) or _RIGHT_AFTER.match(rest)
    return line[0].replace(".", ":", 1) if judged else "" if is_quoted else line[0]


def _last_verdict(text: str, options: Mapping[str, str]) -> str:
    chosen: set[str] = set()
    rank, pending = 0, False
    for clause in _clauses(text, options):
        corrects, pending = clause.corrects or pending, clause.corrects and not clause.chosen
        chosen -= clause.denied
        if not clause.chosen:
            continue
        if corrects or clause.rank > rank or (clause.rank == rank > 1):
            chosen, rank = set(clause.chosen), max(clause.rank, rank)
        elif clause.rank == 1:
            chosen |= clause.chosen
    return "" if not chosen else chosen.pop() if len(chosen) == 1 else _TWO


def _clauses(text: str, options: Mapping[str, str]) -> Iterator[_Clause]:
    start = 0
    for end in [*_BOUNDARY.finditer(text), None]:
        clause = text[start : end.start() if end else None]
        if not (end and "?" in end[0]):
            yield _read(clause, options)
        start = len(text) if end is None else end.start() if end[0][0].isalpha() else end.end()


def _read(clause: str, options: Mapping[str, str]) -> _Clause:
    denied, chosen, rank, end = set[str](), set[str](), 0, 0
    groups = list(_GROUP.finditer(clause))
    for number, group in enumerate(groups):
        letters = {re.sub(r"\W", "", letter).upper() for letter in re.findall(_LETTER, group[0])}
        letters &= set(options or LETTERS)
        before, end = clause[end : group.start()], group.end()
        after = clause[end : groups[number + 1].start() if number + 1 < len(groups) else None]
        if not letters or _NO_OPTION.search(before):
            continue
        if _NOT_BEFORE.search(before) or _NOT_AFTER.match(after):
            denied |= letters
            continue
        its_rank = _rank(before, after, number == 0)
        if its_rank >= rank > 0 or its_rank > rank:
            chosen = letters | (chosen if its_rank == rank else set())
            rank = its_rank
    return _Clause(denied, chosen, rank, _CORRECTION.search(clause) is not None)


def _rank(before: str, after: str, is_first: bool) -> int:
    """3: announced as the answer, 2: called right, 1: named at the end of a clause, 0: only mentioned."""
    announcement = next(reversed(list(_ANNOUNCED.finditer(before))), None)
    if announcement and _GAP.fullmatch(before, announcement.end()):
        return 3
    if _RIGHT_AFTER.match(after):
        return 2
    is_bare = _BARE_AFTER.fullmatch(after) or after[:1] in ":)"
    return int(bool(is_first and is_bare and not _MENTIONED.search(before)))


def _with_letters(text: str, options: Mapping[str, str]) -> str:
    """The text with (B) for the text of option B."""
    names = {
        re.sub(r"^(?:the|an?) ", "", half_width(wording).strip().lower()): letter for letter, wording in options.items()
    }
    longest = sorted(filter(None, names), key=len, reverse=True)
    pattern = "|".join(
        re.escape(name) if not name.isascii() else rf"(?<![\w.-]){re.escape(name)}(?!\w)" for name in longest
    )
    article = r"(?:\b(?:the|an?) )?"
    option = re.compile(f"{article}({pattern})", re.IGNORECASE)
    return option.sub(lambda match: f"({names[match[1].lower()]})", text) if longest else text


def _by_text(text: str, options: Mapping[str, str]) -> str:
    """The letter of the one option whose text this is."""
    same = [letter for letter, option in options.items() if normalize(option) == normalize(text)]
    return same[0] if len(same) == 1 else ""


def _options(choices: Any) -> dict[str, str]:
    """Letter to text; empty when the choices are not known."""
    if hasattr(choices, "tolist"):  # an array from a parquet file
        choices = choices.tolist()
    if isinstance(choices, Mapping) and "text" in choices:
        labels = choices.get("label") or LETTERS
        return {half_width(str(label)).upper(): str(text) for label, text in zip(labels, choices["text"], strict=False)}
    if isinstance(choices, Mapping):
        return {half_width(str(letter)).upper(): str(text) for letter, text in choices.items() if text is not None}
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        return {letter: str(text) for letter, text in zip(LETTERS, choices, strict=False)}
    return {}


def _right_letter(truth: Any, options: Mapping[str, str]) -> str:
    """Raises ValueError when the ground truth names no option: the data is wrong."""
    text = half_width(str(truth)).strip()
    if text.isdecimal() and text not in options.values():
        index = int(text)
        letters = list(options) or list(LETTERS[:_DEFAULT_CHOICES])
        if 0 <= index < len(letters):
            return letters[index]
    match = re.fullmatch(r"\(?([A-Za-z])\)?[.:)]?", text)
    if match and (match[1].upper() in options or not options):
        return match[1].upper()
    letter = _by_text(text, options)
    if not letter:
        raise ValueError(f"the ground truth is no option: {text[:40]!r}")
    return letter
