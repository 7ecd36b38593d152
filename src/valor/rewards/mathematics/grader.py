"""Mathematics problems with one final answer: MATH, MATH-500, DAPO, AIME, AMC, Minerva, OlympiadBench, NuminaMath."""

from __future__ import annotations

from typing import Any

from valor.rewards.answers import after_marks, boxed, final_answers
from valor.rewards.mathematics.equality import equal
from valor.rewards.mathematics.notation import normalize, without_thousands_commas
from valor.rewards.mathematics.quantities import read_quantity
from valor.rewards.mathematics.symbolic import Undecided, any_equal_by_algebra

_MAX_LENGTH = 2000  # characters of an answer; a longer one is degenerate output, and wrong
_MAX_TRUTHS = 10


def grade(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    r"""Score 1 when the final answer means the ground truth (or one of a list), else 0.

    Components: `format` 1 when the answer is announced (`\boxed{}`, "The answer is", "Answer:", `####`, `<answer>`) and
    not just the last formula or number; `pred` the answer in one spelling (for majority votes). When computer algebra
    could not decide in time, `error` says so, and the executor counts the sample as failed.
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


def one_spelling(answer: str) -> str:
    """The answer as text, the same for 1/2, 0.5 and \\frac{1}{2}."""
    text = without_thousands_commas(normalize(answer[:_MAX_LENGTH]))
    quantity = read_quantity(text)
    return text.replace(" ", "") if quantity is None else f"{quantity.value}{'%' if quantity.percent else ''}"


def _truths(ground_truth: Any) -> list[str]:
    """The acceptable answers. Raises ValueError when there is none: the data is wrong."""
    given = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    texts = [str(t).strip() for t in given if t is not None]
    truths = [boxed(t) or after_marks(t) or t for t in texts if t]
    if not truths:
        raise ValueError("the ground truth is empty")
    return truths[:_MAX_TRUTHS]
