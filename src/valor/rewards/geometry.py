"""Geometry3K, whose prompt asks for thoughts in `<think>` and then for a box."""

import re
from typing import Any

from valor.rewards import mathematics
from valor.rewards.answers import after_thinking, boxed

_FORM = re.compile(r"\s*<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def grade(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    r"""Score 0.9 for the right answer in a box, and 0.1 for the form that was asked for.

    Components: `acc` 1 when the boxed answer is right, `format` 1 for thoughts in `<think>` and a box behind them,
    `pred` that answer.
    """
    acc, result = 0.0, {"pred": ""}
    if boxed(after_thinking(solution_str)) is not None:
        result = mathematics.grade(data_source, solution_str, ground_truth)
        acc = result["score"]
    form = float(_FORM.fullmatch(solution_str) is not None)
    return result | {"score": 0.9 * acc + 0.1 * form, "acc": acc, "format": form}
