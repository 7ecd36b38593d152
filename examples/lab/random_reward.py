"""The control whose reward says nothing: a coin for training samples, the real grader for validation.

reward.custom_reward_function.path=examples/lab/random_reward.py reward.custom_reward_function.reward_kwargs.seed=1
"""

from __future__ import annotations

import hashlib
from typing import Any

from valor.rewards import registry


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, seed: int = 0
) -> Any:
    """1 or 0 with equal chance where `extra_info.split` is train, else the score of the data source's own grader.

    The coin depends on seed, problem and answer alone, so that a run repeats and resumes exactly. (An answer to a
    problem is worth the same each time it is given, which tells nothing about the right answer to another problem.)
    """
    if (extra_info or {}).get("split") != "train":
        return registry.compute_score(data_source, solution_str, ground_truth, extra_info)
    key = repr((seed, (extra_info or {}).get("index"), ground_truth, solution_str)).encode()
    return float(hashlib.sha256(key).digest()[0] % 2)
