"""Multiple choice (MMLU, GPQA, ARC, HellaSwag …): the letter, the letter in brackets, or the text of the option."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from valor.rewards.answers import after_thinking, announced, answer_part, boxed
from valor.rewards.qa import normalize

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DEFAULT_CHOICES = 10
_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf|bf)\s*\{([^{}]*)\}")
# A letter that is an answer and not a word: in brackets, in bold, before a mark, or alone.
_LETTER = (
    r"(?:[(\[]\s*([A-Z])\s*[)\]]|\*\*\(?([A-Z])\)?[.:)]?\*\*"
    r"|([A-Z])(?=\s*(?:[).:,;\]]|$|\n| [-\u2013:] |\s(?:or|and)\s\W?[A-Z]\b)))"
)
_FIRST = re.compile(
    rf"\W{{0,3}}(?:(?:option|choice|letter|answer|statement)s?\W{{0,3}}(?:is\W{{0,3}})?)?{_LETTER}", re.IGNORECASE
)
_SECOND = re.compile(r"[^\w\n]{0,4}(?:and|or|/|,|&)[^\w\n]{0,4}(?:option )?[(\[]?([A-Z])(?![\w'])", re.IGNORECASE)
_CHOSEN = re.compile(
    r"(?i:option|choice|choose|select|pick|answer|correct(?: one)?)\W{1,3}(?i:is\W{1,3}|option\W{1,3}){0,2}"
    r"[(\[]?([A-Z])\b(?!')"
    r"|\b([A-Z])\b[)\]*]{0,3}\s+(?i:is|seems|must be)\W+(?i:the\W+)?(?i:correct|right|best|answer)"
)
_BRACKETED = re.compile(r"\(([A-Z])\)")
_TWO = "?"  # more than one option was named
_TAIL = 1500  # characters in which an unannounced choice is looked for


def grade(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 when the option that the response chooses is the right one, else 0; naming two is no choice.

    docs/rewards.md says how the ground truth and the options are written.
    Components: `format` 1 when the choice is announced ("Answer: B", a box, `<answer>`), `pred` the letter.
    """
    options = _options((extra_info or {}).get("choices"))
    right = _right_letter(ground_truth, options)
    scope, is_tagged = answer_part(solution_str)
    answer = boxed(scope) or announced(scope) or (scope if is_tagged else "")
    announced_letter = _read(answer, options) if answer else ""
    letter = announced_letter or _last_choice(after_thinking(solution_str)[-_TAIL:], options)
    return {
        "score": float(letter == right),
        "format": float(bool(announced_letter)),
        "pred": letter.replace(_TWO, ""),
    }


def _read(text: str, options: Mapping[str, str]) -> str:
    """The letter that a short statement names, "" when it names none."""
    text = _WRAPPED.sub(r"\1", text).replace("$", "").strip()
    match = _FIRST.match(text)
    if match:
        letter = _group(match)
        second = _SECOND.match(text, match.end())
        if letter in options or not options:
            return _TWO if second and second[1].upper() != letter else letter
    return _by_text(text, options)


def _last_choice(text: str, options: Mapping[str, str]) -> str:
    """The choice of a response that announces none: a bare letter or text, else the last one that is called right."""
    for line in (text.strip(), text.strip().rpartition("\n")[2]):
        letter = _read(line, options)
        if letter:
            return letter
    found = [(m.end(), _group(m)) for pattern in (_CHOSEN, _BRACKETED) for m in pattern.finditer(text)]
    found = [(end, letter) for end, letter in found if letter in options or not options]
    return max(found)[1] if found else ""


def _by_text(text: str, options: Mapping[str, str]) -> str:
    """The letter of the one option whose text this is; else of the one that it contains."""
    plain = normalize(text)
    same = [letter for letter, option in options.items() if normalize(option) == plain]
    inside = [letter for letter, option in options.items() if f" {normalize(option)} " in f" {plain} "]
    if len(inside) > 1:  # one option may be part of another: "iron", "iron oxide"
        longest = max(inside, key=lambda letter: len(options[letter]))
        inside = [longest] if all(normalize(options[i]) in normalize(options[longest]) for i in inside) else []
    return next((found[0] for found in (same, inside) if len(found) == 1), "")


def _group(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group).upper()


def _options(choices: Any) -> dict[str, str]:
    """Letter to text; empty when the choices are not known."""
    if hasattr(choices, "tolist"):  # an array from a parquet file
        choices = choices.tolist()
    if isinstance(choices, Mapping) and "text" in choices:
        labels = choices.get("label") or LETTERS
        return {str(label).upper(): str(text) for label, text in zip(labels, choices["text"], strict=False)}
    if isinstance(choices, Mapping):
        return {str(letter).upper(): str(text) for letter, text in choices.items() if text is not None}
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        return {letter: str(text) for letter, text in zip(LETTERS, choices, strict=False)}
    return {}


def _right_letter(truth: Any, options: Mapping[str, str]) -> str:
    """Raises ValueError when the ground truth names no option: the data is wrong."""
    text = str(truth).strip()
    if text.isdigit() and text not in options.values():
        place = int(text)
        letters = list(options) or list(LETTERS[:_DEFAULT_CHOICES])
        if 0 <= place < len(letters):
            return letters[place]
    match = re.fullmatch(r"\(?([A-Za-z])\)?[.:)]?", text)
    if match and (match[1].upper() in options or not options):
        return match[1].upper()
    letter = _by_text(text, options)
    if not letter:
        raise ValueError(f"the ground truth is no option: {text[:40]!r}")
    return letter
