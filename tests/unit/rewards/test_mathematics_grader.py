"""The mathematics grader on whole responses: model outputs with published labels, published answers."""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from valor.rewards import mathematics
from valor.rewards.answers import ends_in_a_loop, final_answers
from valor.rewards.executor import RewardExecutor, Sample
from valor.rewards.mathematics import grade


@pytest.mark.parametrize(
    ("response", "answer", "stated"),
    [
        (r"so \boxed{5}.", "5", True),
        (r"\boxed{\frac{1}{2}} or so", r"\frac{1}{2}", True),
        (r"first \boxed{3}, no: \boxed{5}", "5", True),  # corrected
        (r"\boxed{3} and \boxed{5}", "3, 5", True),  # side by side
        (r"\boxed{\boxed{5}}", r"\boxed{5}", True),
        (r"so \fbox{5}", "5", True),
        (r"so \boxed 5", "5", True),
        (r"\boxed{5} hence \boxed{\frac{1}{2", "5", True),  # the last one was cut off
        ("The answer is 72.", "72", True),
        ("The final answer is $2.5$. I hope it is correct.", "$2.5$", True),
        ("**Answer:** 5", "5", True),
        ("Answer:\n\n5", "5", True),
        ("the answer to the question is: 5", "5", True),
        ("The answer is Rs. 500.", "500", True),
        ("work\n#### 1,080", "1,080", True),
        ("The answer is <<3+4=7>>7 apples.\n#### 8", "8", True),
        ("8 answers: 3 + 4 = <<3+4=7>>7\nA: 7", "7", True),
        (r"The answer is 7. \boxed{5}", "5", True),  # a box goes first
        ("<think>\\boxed{1}</think>\nThe answer is 2", "2", True),
        ("<answer>5</answer> \\boxed{6}", "5", True),
        (r"<answer>\boxed{5}</answer>", "5", True),
        ("We get 4.\nSo it takes 12 minutes.", "12 minutes", False),
        ("We get\n$$x = \\frac{3}{2}$$", r"x = \frac{3}{2}", False),
        ("Half of it.\nThat is 40% of all.", "40%", False),
        ("The answer is 5!", "5!", True),
        ("x^2 + 1", "x^2 + 1", False),
    ],
)
def test_where_the_answer_stands(response: str, answer: str, stated: bool) -> None:
    found = final_answers(response)
    assert (found[0].text, found[0].stated) == (answer, stated)


def test_an_announced_sentence_also_counts_by_its_number() -> None:
    assert [a.text for a in final_answers("The answer is 5 apples, not 6.")] == ["5", "5 apples, not 6"]
    assert [a.text for a in final_answers("The answer is 4 * 6 = 24 cookies")] == ["24", "4 * 6 = 24 cookies"]


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"\boxed{\boxed{5}}", "5", 1),
        ("The probability is 3/4.", "3/4", 1),
        ("The probability is 3/4.", "4", 0),
        ("The solutions are $1$, $2$ and $3$.", "1,2,3", 1),
        ("So $x=1$ or $x=2$.", "2", 0),
        ("As $a=2$ and $b=3$, $b=3$", "3", 1),
        (r"x=\boxed{1} or x=\boxed{2}", "1,2", 1),
        (r"$x=\boxed{1}\text{ or }x=\boxed{2}$", "1,2", 1),
        (r"\[\boxed{1} \quad \text{or} \quad \boxed{2}\]", "2", 0),
        (r"$$\boxed{(2,2)} \quad \text{and} \quad \boxed{(6,2)}$$", "(2,2), (6,2)", 1),
        (r"\boxed{p=5,q=2}\text{ 或 }\boxed{p=7,q=2}", "(5,2),(7,2)", 1),
        ("It\u2019s 50 in all.", "50", 1),
        ("It costs 1,000.99€", "1000.99", 1),
        ("The area is 50m².", "50", 1),
        ("The area is 50 m^2", "50", 1),
        ("它的面积是50m²。", "50", 1),
        (r"It is \boxed{17", "17", 0),
        (r"\boxed{\text{The second player}}", r"\text{second player}", 1),
        ("The answer is 5 or 6.", "6", 0),
        ("So the answer is $x=3$ and $x=-2$.", "3,-2", 1),
        (r"The final answer is $\frac{3}{4}$ of the cake.", "3/4", 1),
        ("Answer: $12", "12", 1),
        ("The answer is 1,234.5 dollars.", "1234.5", 1),
        ("The answer is 1 1/2 cups.", "1.5", 1),
        ("The answer is five.", "5", 1),
        ("The answer is: Yes, because 2 is prime.", "Yes", 1),
        ("So the answer is ] } >.", "] } >", 1),
        ("Answer: 2.5 hours", "150 minutes", 1),
        ("Answer: (A) 12", "12", 1),
        ("Answer: (A) 12", "A", 1),
        ("<think>The answer is 4</think>The answer is 5", "4", 0),
        ("so f(x) = 3x + 2", "2", 0),  # a term is no answer
        ("Final answer: 3x+2", "2", 0),
        ("The point is (1,2).", "(1,2)", 1),
        ("The answer is 36!!!!", "36", 1),
        ("The correct option is B.", "B", 1),
    ],
)
def test_whole_responses(response: str, truth: str, score: int) -> None:
    assert grade("math", response, truth)["score"] == score


def test_no_answer() -> None:
    for response in ("", "   \n ", "I do not know\nanything.", r"\boxed{}", "(" * 500, "</think>"):
        assert not any(a.stated for a in final_answers(response))
        assert grade("math", response, "5")["score"] == 0.0


@pytest.mark.parametrize(
    ("response", "is_loop"),
    [
        ("52 inches - 4.25 feet = " * 20, True),
        ("so 8, " * 14 + "so 8", True),
        ("= 24\n" * 40 + "= 2", True),  # cut off within
        ("The first is 1, the second is 2, the third is 3, and together they are 6. So there are 6 of them.", False),
        ("0.3333333333333333", False),
        ("", False),
    ],
)
def test_degenerate_loops(response: str, is_loop: bool) -> None:
    assert ends_in_a_loop(response) is is_loop


def test_a_loop_has_no_answer_unless_it_was_announced() -> None:
    loop = "We can rewrite this as x = 24.\n" * 30
    assert grade("math", loop, "24")["score"] == 0.0
    assert grade("math", "The answer is 24.\n" * 30, "24")["score"] == 1.0
    assert grade("math", r"\boxed{24} as we see. " * 30, "24")["score"] == 1.0


def test_components() -> None:
    assert grade("math", r"so \boxed{0.5}", r"\frac12") == {"score": 1.0, "format": 1.0, "pred": "1/2"}
    assert grade("math", "it takes\n12 minutes", "12") == {"score": 1.0, "format": 0.0, "pred": "12"}
    assert grade("math", "no idea,\nreally", "12") == {"score": 0.0, "format": 0.0, "pred": ""}


@pytest.mark.parametrize("truth", ["5", 5, 5.0, ["7", "5"], ["5\n"], r"so \boxed{5}", "3 + 2 = 5\n#### 5"])
def test_ground_truths(truth: Any) -> None:
    assert grade("math", r"\boxed{5}", truth)["score"] == 1.0
    assert grade("math", r"\boxed{6}", truth)["score"] == 0.0


@pytest.mark.parametrize("truth", ["", None, [], ["", None], "  "])
def test_an_empty_ground_truth_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match="ground truth is empty"):
        grade("math", r"\boxed{5}", truth)


def test_agreement_with_published_labels_of_real_outputs(shared_dir: Path) -> None:
    lines = (shared_dir / "data" / "math_graded_outputs_sample.jsonl").read_text().splitlines()
    agree: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for row in map(json.loads, lines):
        result = grade("math", row["output"], row["gold"])
        assert "error" not in result
        agree[row["source"]] += bool(result["score"]) == row["label"]
        total[row["source"]] += 1
    assert total.total() == 327
    assert agree["gsm8k_gpt3"] == total["gsm8k_gpt3"] == 105
    assert agree.total() / total.total() >= 0.98
    assert agree["hardverify"] / total["hardverify"] >= 0.8


def published_answers(folder: Path) -> list[str | list[str]]:
    rows = [json.loads(line)["answer"] for line in (folder / "math500.jsonl").read_text().splitlines()]
    for name in ("verlfmt_aime24", "verlfmt_aime25", "verlfmt_minerva", "bigmath_rl_prime_verlfmt_5000"):
        models = pq.read_table(folder / f"{name}.parquet", columns=["reward_model"])["reward_model"].to_pylist()
        rows += [model["ground_truth"] for model in models]
    return [row for row in rows if first(row).strip()]


def first(truth: str | list[str]) -> str:
    return truth if isinstance(truth, str) else truth[0]


WAYS: list[tuple[int, Callable[[str], str]]] = [  # how many of 1500 may fail: Big-Math's damaged and odd ones ("?")
    (2, lambda text: f"So we get\n\\[\n\\boxed{{ {text} }}\n\\]\n"),
    (
        2,
        lambda text: (
            "\\boxed{" + text.replace("\\frac{", "\\dfrac{").replace("\\left(", "(").replace("\\right)", ")") + "}"
        ),
    ),
    (12, lambda text: f"Thus.\n**Answer:** {text.strip()}"),
    (9, lambda text: text),
]


@pytest.mark.parametrize(("allowed", "write"), WAYS)
def test_published_answers_score_against_themselves_however_written(
    shared_dir: Path, allowed: int, write: Callable[[str], str]
) -> None:
    truths = published_answers(shared_dir / "data")
    assert len(truths) > 5800
    # Of Big-Math's answers some are damaged: half of a brace pair, text cut off.
    sound = [t for t in truths if first(t).count("{") == first(t).count("}") and "\n" not in first(t).strip()]
    sample = random.Random(0).sample(sound, 1500)
    failed = [t for t in sample if grade("math", write(first(t)), t)["score"] != 1.0]
    assert len(failed) <= allowed, failed


def test_published_answers_do_not_score_against_others(shared_dir: Path) -> None:
    truths = published_answers(shared_dir / "data")[:832:6]  # MATH-500, AIME, Minerva: algebra takes 30 ms each
    others = truths[:]
    random.Random(1).shuffle(others)
    scored = [
        (truth, other)
        for truth, other in zip(truths, others, strict=True)
        if first(truth).strip() != first(other).strip() and grade("math", f"\\boxed{{{first(other)}}}", truth)["score"]
    ]
    assert scored == []


def test_a_timeout_is_an_error_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def think(truth: str, answer: str) -> bool:
        while True:
            pass

    forgotten = []
    monkeypatch.setattr(mathematics, "_library", lambda: (think, lambda: forgotten.append(1)))
    monkeypatch.setattr(mathematics, "SECONDS", 0.1)
    result = grade("math", r"\boxed{\int_0^1 x dx}", r"\int_0^1 y dy")
    assert result["score"] == 0.0 and "did not decide within 0.1 s" in result["error"]
    assert forgotten == [1]


def test_a_ground_truth_that_is_too_large_is_an_error_unless_the_text_is_the_same() -> None:
    assert grade("math", r"\boxed{9^{9^{9^9}}}", "9^{9^{9^9}}")["score"] == 1.0
    for answer in (r"(9^{9^9})^{9^8}", "12"):
        assert "too large" in grade("math", rf"\boxed{{{answer}}}", "9^{9^{9^9}}")["error"]


def test_what_could_not_be_decided_is_an_error_of_the_run() -> None:
    samples = [Sample("math", r"\boxed{12}", "12"), Sample("math", r"\boxed{(9^{9^9})^{9^8}}", "9^{9^{9^9}}")]
    with RewardExecutor(num_workers=1, timeout=60, error_score=-1.0) as executor:
        decided, undecided = executor.score(samples)
    assert (decided.score, decided.error) == (1.0, None)
    assert undecided.score == -1.0 and "too large" in (undecided.error or "")
    assert undecided.components["format"] == 1.0


@pytest.mark.parametrize("truth", [{"answer": "72"}, [[1, 2], [3, 4]], ["1", ("2", "3")]])
def test_a_ground_truth_of_another_shape_is_an_error_and_not_a_wrong_answer(truth: object) -> None:
    with pytest.raises(ValueError, match="the ground truth is a text, a number or a list of such"):
        grade("math", r"\boxed{[1, 2]}", truth)
