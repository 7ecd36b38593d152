"""The manager beside the plain one: a function of whole batches."""

from pathlib import Path

import pytest

from valor.config.reward import RewardConfig
from valor.errors import UserError
from valor.rewards.executor import Sample
from valor.rewards.manager import make_graders

BATCH = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    if "raise" in solution_strs: raise ValueError("no")
    if "few" in solution_strs: return [1.0]
    if "one number" in solution_strs: return 1.0
    if "numbered" in solution_strs: return {i: 1.0 for i, _ in enumerate(solution_strs)}
    if "no score" in solution_strs: return [None if s == "no score" else 0.5 for s in solution_strs]
    best = max(solution_strs, key=len)
    return [{"score": (s == best) + bonus, "size": len(solution_strs)} for s in solution_strs]
"""


def samples(*responses: str) -> list[Sample]:
    return [Sample("mine", response, "good", {"index": i}) for i, response in enumerate(responses)]


def test_a_function_of_whole_batches_is_called_once(tmp_path: Path) -> None:
    (tmp_path / "whole.py").write_text(BATCH)
    function = {"path": str(tmp_path / "whole.py"), "reward_kwargs": {"bonus": 0.5}}
    manager = make_graders(
        RewardConfig.model_validate(
            {
                "num_workers": 1,
                "error_score": -1.0,
                "custom_reward_function": function,
                "reward_manager": {"name": "batch"},
            }
        )
    )
    try:
        assert manager.grades_everything and not manager.one_by_one
        results = manager.score(samples("a", "aaa", "aa"))
        assert [r.score for r in results] == [0.5, 1.5, 0.5]
        assert all(r.components == {"size": 3} for r in results)
        raised = manager.score(samples("a", "raise"))
        assert [(r.score, "ValueError: no" in (r.error or "")) for r in raised] == [(-1.0, True)] * 2
        few = manager.score(samples("a", "few"))
        assert all("1 scores for 2 samples" in (r.error or "") for r in few)
        for kind in ("one number", "numbered"):
            assert all("not a list with a score for each" in (r.error or "") for r in manager.score(samples("a", kind)))
        one_without = manager.score(samples("a", "no score"))
        assert [(r.score, r.error is None) for r in one_without] == [(0.5, True), (-1.0, False)]
        assert manager.score([]) == []
    finally:
        manager.close()


def test_a_function_of_single_samples_is_no_function_of_batches(tmp_path: Path) -> None:
    (tmp_path / "single.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): ...\n")
    config = {"custom_reward_function": {"path": str(tmp_path / "single.py")}, "reward_manager": {"name": "batch"}}
    with pytest.raises(UserError, match="must take data_sources, solution_strs, ground_truths, extra_infos"):
        make_graders(RewardConfig.model_validate(config))
