"""From (prompt, response, ground truth) to a score: graders, and the processes that run them.

Nothing here imports torch, so that grader processes start fast.
"""

from valor.rewards.registry import compute_score

__all__ = ["compute_score"]
