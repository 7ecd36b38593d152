"""Rewards for form and length, put together with a grader; and the time limit that graders share."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from valor.rewards import countdown, mathematics
from valor.rewards.deadline import run_within
from valor.user_files import load_file

FORM = load_file(str(Path(__file__).parents[3] / "examples" / "rewards" / "form.py"), "path")


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("<think>a\nb</think>\n<answer>b</answer>\n", 1),
        ("a\n</think>\n<answer>b</answer>", 1),  # the template has opened the thoughts
        ("</think><answer>b</answer>", 1),
        ("<answer>b</answer>", 0),
        ("a</think>b</think><answer>b</answer>", 0),
        ("a<think>b</think><answer>b</answer>", 0),
        ("a</think>so <answer>b</answer>", 0),
        ("<think>a</think>", 0),
        ("so <think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a<think>b</think></think><answer>b</answer>", 0),
    ],
)
def test_think_and_answer(text: str, good: int) -> None:
    assert FORM.has_think_and_answer(text) == good


def test_think_and_box() -> None:
    assert FORM.has_think_and_box(r"<think>x</think> \boxed{5}") == 1.0
    assert FORM.has_think_and_box(r"<think>x \boxed{5}</think> y") == 0.0
    assert FORM.has_think_and_box("x\n</think>\n\\boxed{5}") == 1.0
    assert FORM.has_think_and_box(r"x \boxed{5}") == FORM.has_think_and_box(r"a<think>x</think> \boxed{5}") == 0.0


def test_repetition_penalty() -> None:
    assert FORM.repetition_penalty("one two three") == 0.0
    assert FORM.repetition_penalty("a b c d e f g") == 0.0
    assert FORM.repetition_penalty("a b c d a b c d") == pytest.approx(4 / 5 - 1)
    assert FORM.repetition_penalty("again " * 1000) < -0.99


def has_box(text: str) -> float:
    return float("\\boxed" in text)


def test_a_grader_and_a_format_make_a_grader() -> None:
    both = FORM.combine(countdown.grade, {"box": has_box}, {"acc": 0.8, "box": 0.2})
    right, wrong = both("game24", r"\boxed{4*6+1-1}", "1 1 4 6"), both("game24", r"\boxed{4*6}", "1 1 4 6")
    assert right["score"] == pytest.approx(1.0) and (right["acc"], right["box"], right["numbers"]) == (1.0, 1.0, 1.0)
    assert wrong["score"] == pytest.approx(0.2) and wrong["acc"] == 0.0
    with pytest.raises(ValueError, match="acc, box"):
        FORM.combine(countdown.grade, {"box": has_box}, {"acc": 1.0})


def test_the_form_counts_a_little() -> None:
    grade = FORM.combine(mathematics.grade, {"box": FORM.has_think_and_box}, {"acc": 0.9, "box": 0.1})
    scores = [r"<think>x</think> \boxed{5}", r"\boxed{5}", r"<think>x</think> \boxed{6}", "no"]
    found = [grade("math", text, "5") for text in scores]
    assert [f["score"] for f in found] == pytest.approx([1.0, 0.9, 0.1, 0.0])
    assert [f["acc"] for f in found] == [1.0, 1.0, 0.0, 0.0]


def spin() -> None:
    while True:
        with suppress(Exception):
            sum(range(100))


def stubborn() -> str:
    """Catches everything, as some libraries do, and makes a result of it."""
    try:
        spin()
    except BaseException:
        return "no"
    return "never"


@pytest.mark.parametrize("endless", [spin, stubborn])
def test_code_without_an_end_is_ended_in_every_thread(endless) -> None:
    def limited() -> float:
        start = time.perf_counter()
        with pytest.raises(TimeoutError, match=r"longer than 0.1 s"):
            run_within(0.1, endless)
        return time.perf_counter() - start

    assert limited() < 20
    with ThreadPoolExecutor(3) as threads:
        assert all(took < 20 for took in threads.map(lambda _: limited(), range(3)))


def test_results_and_exceptions_pass_through_a_time_limit() -> None:
    assert run_within(5, int, "7") == 7
    with pytest.raises(ZeroDivisionError):
        run_within(5, lambda: 1 // 0)
    before = threading.active_count()
    for _ in range(200):
        run_within(5, int, "7")
    assert threading.active_count() <= before


def test_an_end_at_the_limit_is_one_or_the_other() -> None:
    def busy() -> int:
        end = time.perf_counter() + 0.01
        while time.perf_counter() < end:
            pass
        return 1

    for _ in range(60):
        with suppress(TimeoutError):
            assert run_within(0.01, busy) == 1
    assert sum(range(1000)) == 499500  # nothing strikes later
