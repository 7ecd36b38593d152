"""Problems with one number as answer: GSM8K, where it stands after `####`, and the arithmetic of the demonstration."""

import re
from typing import Any

from valor.rewards.numerals import NUMBER, ground_truth_number, last_match, last_number, number_value, plain

# What follows must not continue the number (1.2.3, 1,2, 1/2/3): then nothing was clearly stated.
_STRICT = re.compile(r"####[ \t]*" + NUMBER + r"(?![0-9]|[.,/][0-9])")


def grade_strict(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 when the number after the last `####` equals the ground truth, else 0.

    The last `####` with a number counts wherever it stands.
    Components: `format` 1 when there is an answer after `####`, `flexible` 1 when the last number anywhere is right,
    `pred` the answer as text (for majority votes).
    """
    match = last_match(_STRICT, plain(solution_str))
    answer = number_value(match) if match else None
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
    truth, number = ground_truth_number(ground_truth), last_number(solution_str)
    value = number[1] if number else None
    return {"score": float(value == truth), "pred": "" if value is None else str(value)}
