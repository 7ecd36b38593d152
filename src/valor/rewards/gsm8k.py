"""Problems with one number as answer: GSM8K, where it stands after `####`, and the arithmetic of the demonstration."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from valor.rewards.numerals import NUMBER, ground_truth_number, last_number, number_value, plain

# verl looks at the last 300 characters only: an answer that is followed by more text than that is no final answer.
_TAIL = 300
# What follows must not continue the number (1.2.3, 1,2, 1/2/3): then nothing was clearly stated.
_STRICT = re.compile(r"####[ \t]*" + NUMBER + r"(?![0-9]|[.,/][0-9])")


def strict_answer(text: str) -> Fraction | None:
    """The number right after the last `####` that has one, within the last 300 characters; None without it."""
    last = None
    for match in _STRICT.finditer(plain(text[-_TAIL:])):
        last = match
    return number_value(last) if last else None


def grade_strict(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 when the number after `####` equals the ground truth, else 0.

    Components: `format` 1 when there is an answer after `####`, `flexible` 1 when the last number anywhere is right,
    `pred` the answer as text (for majority votes).
    """
    answer = strict_answer(solution_str)
    return {
        "score": float(answer == ground_truth_number(ground_truth)),
        "format": float(answer is not None),
        "flexible": grade_flexible(data_source, solution_str, ground_truth)["score"],
        "pred": "" if answer is None else str(answer),
    }


def grade_flexible(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 when the last number anywhere in the response equals the ground truth, else 0.

    Component: `pred` that number.
    """
    truth, found = ground_truth_number(ground_truth), last_number(solution_str)
    value = found[1] if found else None
    return {"score": float(value == truth), "pred": "" if value is None else str(value)}


def grade_integer(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 when the last number is an integer equal to the ground truth, else 0.

    Component: `pred` that number as text.
    """
    if ground_truth_number(ground_truth).denominator != 1:
        raise ValueError(f"the ground truth is not an integer: {str(ground_truth)[:40]!r}")
    return grade_flexible(data_source, solution_str, ground_truth)
