"""Integer arithmetic, the task of the demonstration: the last number of the response is the answer."""

from __future__ import annotations

from typing import Any

from valor.rewards.numerals import format_number, ground_truth_number, last_number


def grade(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 when the last number is an integer equal to the ground truth, else 0.

    Component: `pred` that number as text.
    """
    truth = ground_truth_number(ground_truth)
    if truth.denominator != 1:
        raise ValueError(f"the ground truth is not an integer: {str(ground_truth)[:40]!r}")
    found = last_number(solution_str)
    correct = found is not None and found[1] == truth
    return {"score": float(correct), "pred": "" if found is None else format_number(found[1])}
