"""Integer arithmetic, the task of the demonstration: the last number of the response is the answer."""

from __future__ import annotations

from typing import Any

from valor.rewards.gsm8k import grade_flexible
from valor.rewards.numerals import ground_truth_number


def grade(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 when the last number is an integer equal to the ground truth, else 0.

    Component: `pred` that number as text.
    """
    if ground_truth_number(ground_truth).denominator != 1:
        raise ValueError(f"the ground truth is not an integer: {str(ground_truth)[:40]!r}")
    return grade_flexible(data_source, solution_str, ground_truth)
