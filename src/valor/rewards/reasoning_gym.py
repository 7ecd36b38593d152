"""Every task of reasoning-gym, each graded by its own `score_answer` (`pip install 'valor-rl[reasoning]'`)."""

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from valor.errors import UserError
from valor.rewards.answers import after_thinking, boxed, tagged
from valor.rewards.deadline import run_within
from valor.user_files import installed

PREFIX = "reasoning_gym/"
_MAX_LENGTH = 20_000  # characters of an answer
_SECONDS = 1.5

# These tasks give the answer to Python's eval (directly, or by sympy's parse_expr): it may only be what it should be.
_LISTS = re.compile(r"""[\w\s\[\],.'"-]*""")
_FORMULA = re.compile(
    r"(?!.*(?:\d{30}|(?:\*\*|\^)\s*\(?\s*\d{3}|(?:\*\*|\^)[^+*/-]*(?:\*\*|\^)))"
    r"(?:[\d\s+*/^().,=-]|(?<![A-Za-z_.])(?:[A-Za-z]|pi|exp|sqrt|log|ln|a?(?:sin|cos|tan)h?|sec|csc|cot)(?![A-Za-z_.]))*",
    re.DOTALL,
)
_BOARDS = ("arc_agi", "rearc")  # they compare with a board of tuples, which JSON has turned into lists
_EVALUATED = {
    **dict.fromkeys(("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"), _LISTS),
    **dict.fromkeys(("puzzle24", "countdown", "polynomial_multiplication"), _FORMULA),
    **dict.fromkeys(("simple_integration", "intermediate_integration"), _FORMULA),
}


def grade(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 0 to 1 as the task gives it, for `data_source` "reasoning_gym/<task>".

    The puzzle is `extra_info["entry"]` (a dictionary or its JSON), or else question and metadata in `extra_info`, with
    the ground truth as its answer. The answer is what stands in `<answer>`, else in a box, else the whole response.
    Code where a task would run it scores 0. Components: `acc` 1 for a full score, `format` 1 with `<answer>` or a box,
    `pred` the answer, and `error` when the task failed on this answer.
    """
    text = after_thinking(solution_str)
    marked = tagged(text) or boxed(text)
    answer = (marked or text.strip())[:_MAX_LENGTH]
    result = {"acc": 0.0, "format": float(bool(marked)), "pred": answer[:200]}
    task, entry = data_source.removeprefix(PREFIX), _entry(ground_truth, extra_info)
    allowed = _EVALUATED.get(task)
    if allowed and not allowed.fullmatch(answer) and answer != entry["answer"]:
        return {"score": 0.0, **result}
    score_answer = _score_answer(task)
    try:
        score = float(run_within(_SECONDS, lambda: score_answer(answer=answer, entry=entry)))
    except Exception as error:
        return {"score": 0.0, **result, "error": f"{task}.score_answer: {type(error).__name__}: {error}"}
    return {"score": score, **result, "acc": float(score >= 1.0)}


def _entry(ground_truth: Any, extra_info: Mapping[str, Any] | None) -> dict[str, Any]:
    """The puzzle as the task made it. Raises ValueError when it is not there."""
    fields = dict(extra_info or {})
    entry = fields.get("entry", fields)
    entry = json.loads(entry) if isinstance(entry, str) else dict(entry)
    if isinstance(entry.get("metadata"), str):
        entry["metadata"] = json.loads(entry["metadata"])
    if "metadata" not in entry:
        raise ValueError("extra_info has no reasoning-gym entry")
    board = entry["metadata"].get("output")
    if entry["metadata"].get("source_dataset") in _BOARDS and isinstance(board, list):
        entry["metadata"] = {**entry["metadata"], "output": tuple(map(tuple, board))}
    return {"answer": ground_truth, "question": "", **entry}


@functools.cache
def _score_answer(task: str) -> Callable[..., float]:
    """Raises UserError when reasoning-gym is not there or has no such task."""
    gym = installed("reasoning_gym", f"{PREFIX}{task} needs reasoning-gym", "'valor-rl[reasoning]'")
    try:
        return gym.get_score_answer_fn(task)
    except ValueError:
        raise UserError(f"reasoning-gym has no task '{task}'") from None
