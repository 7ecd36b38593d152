"""Routing by data source, functions from files, and the summary of a step."""

import subprocess
import sys
from pathlib import Path

import pytest

from valor.cli import main
from valor.config.reward import CustomRewardFunctionConfig, RewardConfig
from valor.errors import UserError
from valor.rewards import compute_score, gsm8k, mathematics, qa, search_r1
from valor.rewards.custom import CustomFunction
from valor.rewards.executor import RewardResult, Sample
from valor.rewards.manager import make_graders, summarize
from valor.rewards.registry import BUILT_IN, describe, find_grader, require_graders


def test_built_in_graders_by_data_source() -> None:
    assert compute_score("openai/gsm8k", "#### 7", "7")["score"] == 1.0  # type: ignore[index]
    assert compute_score("openai/gsm8k", "is 7", "7")["score"] == 0.0  # type: ignore[index]
    assert compute_score("openai/gsm8k-flexible", "is 7", "7")["score"] == 1.0  # type: ignore[index]
    assert compute_score("valor/arithmetic", "3+4=7", "7", {"index": 0})["score"] == 1.0  # type: ignore[index]


def test_a_name_goes_before_patterns_and_an_earlier_pattern_before_a_later_one() -> None:
    assert find_grader("openai/gsm8k") is gsm8k.grade_strict
    assert find_grader("gsm8k_other") is mathematics.grade
    assert find_grader("searchR1_nq") is search_r1.grade and find_grader("nq") is qa.grade


@pytest.mark.parametrize(
    ("source", "response", "truth"),
    [
        *(
            (source, r"so \boxed{0.5}", r"\frac12")
            for source in (
                "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math", "math_dapo",
                "math_dapo_reasoning", "aime24", "aime_2025", "test-math-aime24", "numina_olympiads", "numina_amc_aime",
                "math-ai/amc23", "amc23", "minerva_math", "olympiadbench", "bigmath_rl_prime", "gsm8k",
            )
        ),
        *((source, "Answer: B", "B") for source in ("cais/mmlu", "mmlu", "gpqa_diamond", "Rowan/hellaswag")),
        *((f"searchR1_{name}", "<answer>Paris</answer>", {"target": ["Paris"]}) for name in ("nq", "hotpotqa")),
        *((source, "It is Paris.", ["Paris"]) for source in ("nq", "triviaqa", "hotpotqa", "bamboogle")),
        *((source, r"<think>a</think> \boxed{\frac{1}{2}}", "0.5") for source in ("hiyouga/geometry3k", "geo3k")),
        *((source, "4*6+1-1", {"target": 24, "numbers": [1, 1, 4, 6]}) for source in ("countdown", "game24")),
    ],
)  # fmt: skip
def test_sources_of_the_sets_that_everyone_trains_on(source: str, response: str, truth: object) -> None:
    result = compute_score(source, response, truth)
    assert result.get("acc", result["score"]) == 1.0  # type: ignore[union-attr, index]
    wrong = compute_score(source, "Answer: 17 or so, <answer>17</answer>", truth)
    assert wrong.get("acc", wrong["score"]) == 0.0  # type: ignore[union-attr, index]


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"<think>a</think> so \boxed{12.0}", 1.0),
        (r"<think>\boxed{12}</think> so \boxed{13}", 0.1),
        (r"so \boxed{12}", 0.9),
        ("<think>a</think> The answer is 12", 0.0),
        (r"a</think> \boxed{12}", 0.9),
        (r"<think>a</think> \boxed{}", 0.1),
        ("", 0.0),
    ],
)
def test_geometry_has_a_tenth_for_the_form(response: str, score: float) -> None:
    result = compute_score("hiyouga/geometry3k", response, "12")
    assert result["score"] == pytest.approx(score)  # type: ignore[index]


def test_an_unknown_data_source_names_the_known_ones_and_the_way_out() -> None:
    with pytest.raises(UserError) as error:
        require_graders(["openai/gsm8"])
    text = str(error.value)
    assert "'openai/gsm8'" in text and "did you mean openai/gsm8k?" in text
    assert "valor rewards list" in text and "reward.custom_reward_function.path" in text
    assert "\n" not in text
    with pytest.raises(UserError, match="'a', 'b'"):
        require_graders(["openai/gsm8k", "a", "b", "a"])
    require_graders(BUILT_IN)
    assert find_grader("openai/gsm8k") and not find_grader("")


def test_rewards_list_names_every_source_its_score_and_its_components(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewards", "list"]) == 0
    printed = capsys.readouterr().out
    assert all(source in printed for source in BUILT_IN)
    for grader in set(BUILT_IN.values()):
        summary, names = describe(grader)
        assert summary.startswith("Score ") and names, grader


@pytest.mark.parametrize(
    ("source", "response", "truth"),
    [
        ("openai/gsm8k", "#### 5", "5"),
        ("openai/gsm8k-flexible", "5", "5"),
        ("valor/arithmetic", "5", "5"),
        ("math", "5", "5"),
        ("mmlu", "B", "B"),
        ("nq", "Paris", "Paris"),
        ("searchR1_nq", "Paris", "Paris"),
        ("game24", "4*6+1-1", "1 1 4 6"),
    ],
)
def test_components_are_the_documented_ones(source: str, response: str, truth: str) -> None:
    grader = find_grader(source)
    assert grader is not None
    _, names = describe(grader)
    for text in (response, "no"):
        result = compute_score(source, text, truth)
        assert isinstance(result, dict)
        assert result.keys() - {"score"} == set(names) - {"error"}


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


GOOD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0.25\n"


@pytest.mark.parametrize(
    ("text", "name", "kwargs", "message"),
    [
        ("", "compute_score", {}, "no 'compute_score' (it has none)"),
        (GOOD, "compute", {}, "no 'compute'; did you mean compute_score?"),
        ("x = 1", "x", {}, "is not a callable object"),
        ("1/0", "compute_score", {}, "fails on import (ZeroDivisionError: division by zero)"),
        ("def f(:", "compute_score", {}, "fails on import (SyntaxError"),
        ("import no_such_thing", "compute_score", {}, "No module named 'no_such_thing'"),
        ("def compute_score(text): return 0.0", "compute_score", {}, "must take data_source, solution_str"),
        (GOOD, "compute_score", {"strict": True}, "cannot be called with"),
        ("def r(environments, **kwargs): return [0.0]", "r", {}, "what environments know, their get_reward() returns"),
    ],
)
def test_a_bad_custom_function_is_one_clear_line(
    tmp_path: Path, text: str, name: str, kwargs: dict[str, object], message: str
) -> None:
    path = write(tmp_path / "reward.py", text)
    with pytest.raises(UserError) as error:
        CustomFunction(path, name, kwargs).load()
    assert message in str(error.value) and path in str(error.value) and "\n" not in str(error.value)


def test_missing_files_and_modules() -> None:
    with pytest.raises(UserError, match=r"/nowhere/reward.py: no such file"):
        CustomFunction("/nowhere/reward.py").load()
    with pytest.raises(UserError, match=r"'no_such_package.rewards' cannot be imported"):
        CustomFunction("pkg://no_such_package.rewards").load()


def test_functions_from_files_and_modules(tmp_path: Path) -> None:
    path = write(tmp_path / "reward.py", GOOD)
    assert CustomFunction(path).load()("a", "b", "c") == 0.25
    assert CustomFunction("pkg://valor.rewards.gsm8k", "grade_flexible").load()("", "= 3", "3")["score"] == 1.0


def test_summary_by_data_source() -> None:
    results = [
        RewardResult(1.0, {"format": 1.0, "pred": "7"}, None, 0.25),
        RewardResult(0.0, {"format": 0.0, "pred": ""}, None, 0.5),
        RewardResult(-1.0, {}, "ValueError: odd", 0.125),
        RewardResult(0.1, {"acc": False}, None, 0.0),
        RewardResult(0.9, {"acc": True}, None, 0.0),
    ]
    metrics, line = summarize(["a/b", "a/b", "a/b", "", ""], results)
    assert metrics == {
        "reward/errors": 1.0,
        "reward/errors/exception": 1.0,
        "reward/grading_seconds_max": 0.5,
        "reward/a/b/mean": 0.0,
        "reward/a/b/correct": pytest.approx(1 / 3),
        "reward/a/b/format": 0.5,  # over the two samples that have it
        "reward/unnamed/mean": 0.5,
        "reward/unnamed/correct": 0.5,
        "reward/unnamed/acc": 0.5,
    }
    assert line == (
        "reward unnamed: 1/2 correct, mean 0.500, 0 errors; "
        "reward a/b: 1/3 correct, mean 0.000, 1 error (1 x ValueError: odd)"
    )
    assert summarize([], []) == ({"reward/errors": 0.0}, "")


def test_a_learned_reward_is_neither_right_nor_wrong() -> None:
    learned = [RewardResult(score, {"rm_score": score}) for score in (-1.0, 0.5)]
    metrics, line = summarize(["hh", "hh"], learned)
    assert line == "reward hh: mean -0.250, 0 errors" and "reward/hh/correct" not in metrics
    both = [RewardResult(1.5, {"rm_score": 0.5, "rule_score": 1.0, "acc": True})]
    assert summarize(["hh"], both)[1] == "reward hh: 1/1 correct, mean 1.500, 0 errors"


def reward_config(path: str | None = None) -> RewardConfig:
    return RewardConfig(num_workers=1, timeout=5.0, custom_reward_function=CustomRewardFunctionConfig(path=path))


def test_manager_grades_and_checks_sources(tmp_path: Path) -> None:
    manager = make_graders(reward_config())
    try:
        with pytest.raises(UserError, match="no grader for data_source 'mine'"):
            manager.check(["mine"])
        samples = [Sample("valor/arithmetic", f"= {i}", "3") for i in range(4)]
        results = manager.score(samples)
        assert [r.score for r in results] == [0, 0, 0, 1]
        assert manager.score(samples)[3].components == {"pred": "3"}
    finally:
        manager.close()
    custom = make_graders(reward_config(write(tmp_path / "r.py", GOOD)))
    custom.check(["mine"])  # the custom function grades everything
    custom.close()


def test_importing_rewards_loads_no_heavy_library() -> None:
    heavy = ("torch", "numpy", "pyarrow", "sympy", "reasoning_gym")
    code = f"import sys, valor.rewards.manager; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
