"""Tasks of reasoning-gym through their own graders; answers that are code are not run."""

import json
from pathlib import Path

import pytest

from valor.errors import UserError
from valor.rewards.reasoning_gym import grade

gym = pytest.importorskip("reasoning_gym")

TASKS = ["basic_arithmetic", "countdown", "simple_integration", "n_queens", "spiral_matrix", "rearc", "knights_knaves"]


@pytest.mark.parametrize("task", TASKS)
def test_right_and_wrong_answers_of_a_task(task: str) -> None:
    for entry in gym.create_dataset(task, seed=1, size=2):
        for form in (entry, json.dumps(entry, default=str)):  # as data preparation stores it
            source, extra = f"reasoning_gym/{task}", {"entry": form}
            right = grade(source, f"<think>x</think><answer>{entry['answer']}</answer>", entry["answer"], extra)
            assert (right["score"], right["acc"], right["format"]) == (1.0, 1.0, 1.0)
            wrong = grade(source, "<answer>zzz</answer>", entry["answer"], extra)
            assert wrong["score"] < 0.2 and wrong["acc"] == 0.0


def test_the_entry_may_lie_in_extra_info_itself() -> None:
    entry = gym.create_dataset("basic_arithmetic", seed=1, size=1)[0]
    extra = {"index": 0, "metadata": json.dumps(entry["metadata"])}
    assert grade("reasoning_gym/basic_arithmetic", str(entry["answer"]), entry["answer"], extra)["score"] == 1.0
    with pytest.raises(ValueError, match="no reasoning-gym entry"):
        grade("reasoning_gym/basic_arithmetic", "1", "1", {"index": 0})


def test_an_unknown_task() -> None:
    with pytest.raises(UserError, match="no task 'no_such_task'"):
        grade("reasoning_gym/no_such_task", "1", "1", {"metadata": {}})


@pytest.mark.parametrize("task", ["countdown", "simple_integration", "n_queens", "string_insertion", "puzzle24"])
def test_answers_that_are_code_are_not_run(task: str, tmp_path: Path) -> None:
    entry = gym.create_dataset(task, seed=1, size=1)[0]
    trap = tmp_path / "trap"
    for code in (
        f"__import__('os').system('touch {trap}')",
        f"[open('{trap}', 'w')]",
        f"(open)('{trap}', 'w')",
        "9**9**9**9",
        "(9**99)**99",
        "factorial(99999999)",
        "x.__class__",
        "(" * 5000,
        "1+" * 3000 + "1",
    ):
        result = grade(f"reasoning_gym/{task}", f"<answer>{code}</answer>", entry["answer"], {"entry": entry})
        assert result["score"] < 0.2
    assert not trap.exists()


def test_a_task_that_fails_on_an_answer_says_so() -> None:
    entry = gym.create_dataset("prime_factorization", seed=1, size=1)[0]
    result = grade("reasoning_gym/prime_factorization", "<answer>zzz</answer>", entry["answer"], {"entry": entry})
    assert result["score"] == 0.0
    if "error" in result:  # this version does not catch it
        assert "ValueError" in result["error"]
