# ruff: noqa: RUF001  (full-width marks are what some are about)
"""Multiple choice: how a letter or an option is named, and what is no choice."""

from typing import Any

import pytest

from valor.rewards.choice import grade

OPTIONS = ["iron", "iron oxide", "a dog", "The Eiffel Tower"]


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("**B**", "B"),
        ("B. iron oxide", "B"),
        ("iron oxide", "B"),
        ("The answer is (B).", "B"),
        ("Answer: B", "B"),
        ("Answer: $B$", "B"),
        ("Answer: B\n\nExplanation: A is false", "B"),
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{B. iron oxide}", "B"),
        ("<answer>B</answer>", "B"),
        ("<think>A</think>\nC", "C"),
        ("The answer is iron oxide.", "B"),
        ("The correct answer is **B. iron oxide**", "B"),
        ("The best answer is B because A is wrong", "B"),
        ("So the correct option is B.", "B"),
        ("Option B is correct.", "B"),
        ("B is the correct answer", "B"),
        ("I choose option C because", "C"),
        ("We compare (A) with (B).\nTherefore the answer is (D).", "D"),
        ("Let me think. (A) is wrong. (C) fits.", "C"),
        ("A dog is the answer", "C"),  # no letter, but an option's text
        ("it is iron", "A"),
        ("The answer is A or B", ""),
        ("Answer: A, B", ""),
        ("(A) and (C)", ""),
        ("The answer is E", ""),
        ("My final verdict lands on D.", "D"),
        ("We can test A and C quickly; the correct one turns out to be B.", "B"),
        ("Everything points to B.", "B"),
        ("The student says A. But the truth is B.", "B"),
        ("Let us consider A. It has no charge. So B.", "B"),
        ("Looking at A, the mass is wrong. Looking at C, the charge is wrong. That leaves B.", "B"),
        ("\u6bd4\u8f83A\u548cC\u4e4b\u540e\uff0c\u6700\u5408\u9002\u7684\u662fB", "B"),
        ("I cannot decide between A and B.", ""),
        ("no idea", ""),
        ("", ""),
    ],
)
def test_which_option_is_chosen(response: str, letter: str) -> None:
    result = grade("cais/mmlu", response, "B", {"choices": OPTIONS})
    assert (result["pred"], result["score"]) == (letter, float(letter == "B"))


def test_format_tells_an_announced_choice() -> None:
    assert grade("gpqa", "Answer: B", "B") == {"score": 1.0, "format": 1.0, "pred": "B"}
    assert grade("gpqa", "B", "B") == {"score": 1.0, "format": 0.0, "pred": "B"}


@pytest.mark.parametrize("truth", ["B", "(B)", "b", 1, "1", "iron oxide"])
@pytest.mark.parametrize(
    "choices",
    [OPTIONS, dict(zip("ABCD", OPTIONS, strict=True)), {"label": list("ABCD"), "text": OPTIONS}],
)
def test_ground_truths_and_choices(truth: Any, choices: Any) -> None:
    assert grade("mmlu", "Answer: B", truth, {"choices": choices})["score"] == 1.0
    assert grade("mmlu", "Answer: A", truth, {"choices": choices})["score"] == 0.0


def test_a_number_may_be_the_text_of_an_option() -> None:
    assert grade("mmlu", "Answer: C", "1", {"choices": ["3", "2", "1"]})["pred"] == "C"
    assert grade("mmlu", "Answer: C", "1", {"choices": ["3", "2", "1"]})["score"] == 1.0


@pytest.mark.parametrize("truth", ["F", "copper", "", None, 9, "②"])
def test_a_ground_truth_that_is_no_option_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match="no option"):
        grade("mmlu", "Answer: B", truth, {"choices": OPTIONS})


@pytest.mark.parametrize(
    ("truth", "response", "score"),
    [
        ("ABD", "The answer is A, B and D.", 1),
        ("ABD", r"\boxed{\text{D, B, A}}", 1),
        ("ABD", "答案：A、B、D", 1),
        ("ABD", "故选：ABD．", 1),
        ("A, B", "The correct options are A and B", 1),
        (["A", "B"], "I am not sure.\nAB", 1),
        ("ABD", r"\boxed{AB}", 0),
        ("ABD", r"\boxed{ABCD}", 0),
        ("ABD", "Answer: A", 0),
        ("AC", "Answer: all of them", 0),
    ],
)
def test_several_right_options_are_chosen_together(truth: Any, response: str, score: int) -> None:
    choices = {"choices": ["one", "two", "three", "four"]}
    assert grade("mmlu", response, truth, choices)["score"] == score
