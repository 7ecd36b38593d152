"""GSM8K for models that are too small for it: half for `#### number` and nothing else, half for the right number."""

import re
from typing import Any

from valor.rewards.gsm8k import grade_strict

_FORM = re.compile(r"\s*#### ?\$?-?[0-9,]*\.?[0-9]+\s*")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    right = grade_strict(data_source, solution_str, ground_truth)["score"]
    form = float(_FORM.fullmatch(solution_str) is not None)
    return {"score": (form + right) / 2, "form": form, "right": right}
