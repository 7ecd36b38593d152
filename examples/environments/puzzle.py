"""Puzzles of reasoning-gym with several tries: a wrong answer is told, and the policy may answer again.

Needs `pip install 'valor-rl[reasoning]'`; rows by `valor data prepare reasoning_gym/TASK`.
"""

from collections.abc import Mapping
from typing import Any

from valor.agents.env import Env, Step
from valor.errors import UserError
from valor.rewards.reasoning_gym import PREFIX, grade
from valor.user_files import installed

_FEEDBACK = "That answer is not right. Try again, and give the final answer inside <answer> </answer>."


class ReasoningGym(Env):
    """A puzzle of the task `task`: one of its rows.

    At most `tries` answers, each judged by the task's own `score_answer`; after one that is not worth 1, `feedback` is
    told. The episode is worth what its last answer is. UserError: reasoning-gym is not installed, or has no such task.
    """

    def __init__(self, task: str, tries: int = 3, feedback: str = _FEEDBACK) -> None:
        tasks = installed("reasoning_gym.factory", "puzzles need reasoning-gym", "'valor-rl[reasoning]'").DATASETS
        if task not in tasks:
            raise UserError(f"reasoning-gym has no task '{task}'; it has {', '.join(sorted(tasks))}")
        self._source, self._left, self._feedback, self._last = PREFIX + task, tries, feedback, 0.0
        self._row: Mapping[str, Any] = {}

    def reset(self, row: Mapping[str, Any]) -> None:
        self._row = row

    def step(self, text: str) -> Step:
        """Raises RuntimeError when the task cannot judge the answer."""
        result = grade(self._source, text, self._row["ground_truth"], dict(self._row["extra_info"]))
        if "error" in result:
            raise RuntimeError(result["error"])
        self._last, self._left = float(result["score"]), self._left - 1
        return Step(self._feedback, 0.0, self._last >= 1.0 or self._left < 1)

    def score(self) -> float:
        return self._last
