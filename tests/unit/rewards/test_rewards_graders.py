"""Graders against hand-written answers and published labels."""

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from valor.rewards import compute_score, gsm8k
from valor.rewards.numerals import ground_truth_number, last_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        ("1,000", 1000),
        ("1,234,567.50", Fraction("1234567.5")),
        ("$18", 18),
        ("-5", -5),
        ("-$5", -5),
        ("$-5", -5),
        ("\u22127", -7),
        ("+4", 4),
        (".5", Fraction(1, 2)),
        ("1/2", Fraction(1, 2)),
        ("1e3", 1000),
        ("72.", 72),
        (r"\$36", 36),
        ("10{,}000", 10000),
        (r"10\,000", 10000),
        ("007", 7),
        ("", None),
        ("abc", None),
        ("1.2.3", None),
        ("1,2", None),
        ("5-3", None),
        ("1/0", None),
        ("1e999", None),
        ("9" * 500, None),
        ("72 clips", None),
    ],
)
def test_ground_truths_are_exactly_one_number(text: str, value: int | Fraction | None) -> None:
    if value is not None:
        assert ground_truth_number(text) == value
        return
    with pytest.raises(ValueError, match="not a number"):
        ground_truth_number(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("She sold 48 + 24 = 72 clips.", 72),
        ("The answer is 72.", 72),
        ("10-3=7", 7),
        ("from 5-10", 10),  # a range, no sign
        ("(3)-2", 2),  # subtraction, no sign
        ("x = -2", -2),
        ("costs $1,080.00!", 1080),
        ("**Answer: 18**", 18),
        (r"\boxed{42}", 42),
        ("half of CO2 and x2", None),  # digits inside words are no numbers
        ("5 apples in box3", 5),
        ("The answer is 50%", 50),
        ("no number here", None),
        ("", None),
        ("1,234," + "a" * 300, 1234),  # found behind a long tail without numbers
    ],
)
def test_last_number(text: str, value: int | None) -> None:
    found = last_number(text)
    assert (found[1] if found else None) == value


@given(st.integers(-(10**12), 10**12), st.text(alphabet="abc ,.$(-\n", max_size=150))
def test_an_integer_at_the_end_is_found_whatever_stands_before(number: int, before: str) -> None:
    found = last_number(f"{before} = {number}")
    assert found is not None and found[1] == number
    found = last_number(f"{before} = {number:,}")
    assert found is not None and found[1] == number


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("48/2 = 24, 48+24 = 72\n#### 72", 1, 1),
        ("#### 72.", 1, 1),
        ("#### $72", 1, 1),
        ("#### 72.00", 1, 1),
        ("####72", 1, 1),
        ("#### 72 clips", 1, 1),
        ("#### 1 #### 72", 1, 1),  # the last one counts
        ("#### 72\n####", 1, 1),
        ("#### 71", 0, 0),
        ("#### -72", 0, 0),
        ("#### 72.5", 0, 0),
        ("#### 7,2", 0, 0),
        ("#### seventy-two", 0, 0),
        ("The answer is 72.", 0, 1),  # right, but not as asked
        ("#### **72**", 0, 1),
        ("#### 72\nThat took me 3 steps.", 1, 0),  # flexible takes the last number anywhere
        ("#### 72\n" + "and the steps above agree. " * 40, 1, 1),  # wherever it stands
        ("#### 72 " + "Note 5. " * 100, 1, 0),
        ("#### 72\n" * 50 + "#### 71\n" + "so it is. " * 100, 0, 0),
        ("####\u3000\uff17\uff12", 1, 1),  # full-width
        ("一共有72个。\n#### 72个", 1, 1),
        ("温度是-72度", 0, 0),
        ("", 0, 0),
    ],
)
def test_gsm8k_strict_and_flexible(text: str, strict: int, flexible: int) -> None:
    result = gsm8k.grade_strict("openai/gsm8k", text, "72")
    assert (result["score"], result["flexible"]) == (strict, flexible)
    assert gsm8k.grade_flexible("openai/gsm8k", text, "72")["score"] == flexible


def test_gsm8k_components_tell_format_from_knowledge() -> None:
    assert gsm8k.grade_strict("", "It is 5.\n#### 1,080", "1080") == {
        "score": 1.0, "format": 1.0, "flexible": 1.0, "pred": "1080",
    }  # fmt: skip
    assert gsm8k.grade_strict("", "It is 5.", "5") == {"score": 0.0, "format": 0.0, "flexible": 1.0, "pred": ""}


def test_every_gsm8k_ground_truth_scores_against_its_own_solution(shared_dir: Path) -> None:
    rows = [json.loads(line) for line in (shared_dir / "data" / "gsm8k_test.jsonl").read_text().splitlines()]
    assert len(rows) == 1319
    for row in rows:
        truth = row["answer"].split("####")[-1].strip()
        assert gsm8k.grade_strict("openai/gsm8k", row["answer"], truth)["score"] == 1.0
        assert gsm8k.grade_strict("openai/gsm8k", row["answer"], truth.replace(",", "") + "1")["score"] == 0.0


def test_flexible_agrees_with_published_labels_of_real_outputs(shared_dir: Path) -> None:
    lines = (shared_dir / "data" / "math_graded_outputs_sample.jsonl").read_text().splitlines()
    rows = [r for r in map(json.loads, lines) if r["source"] in ("gsm8k_gpt3", "rho") and r["dataset"] == "gsm8k"]
    assert len(rows) == 162
    for row in rows:
        assert bool(gsm8k.grade_flexible("", row["output"], row["gold"])["score"]) == row["label"], row


@pytest.mark.parametrize(
    ("text", "score", "pred"),
    [
        ("3 + 4 = 7", 1, "7"),
        ("7", 1, "7"),
        ("7.", 1, "7"),
        ("7.5", 0, "15/2"),
        ("70", 0, "70"),
        ("-7", 0, "-7"),
        ("7 is my answer, not 8", 0, "8"),
        ("seven", 0, ""),
    ],
)
def test_arithmetic(text: str, score: int, pred: str) -> None:
    assert compute_score("valor/arithmetic", text, "7") == {"score": score, "pred": pred}
    assert compute_score("valor/arithmetic", text, 7) == {"score": score, "pred": pred}


@pytest.mark.parametrize("truth", ["", "seven", None, "7 apples"])
def test_a_ground_truth_that_is_no_number_is_an_error(truth: object) -> None:
    with pytest.raises(ValueError, match="ground truth is not a number"):
        ground_truth_number(truth)
    with pytest.raises(ValueError, match="ground truth"):
        gsm8k.grade_strict("openai/gsm8k", "#### 7", truth)


@pytest.mark.parametrize("unit", ["1", "1,", "-", "1,111", "#### ", "1e", "$", "1/", "9.9"])
def test_degenerate_output_is_graded_in_no_time(unit: str) -> None:
    start = time.thread_time()
    gsm8k.grade_strict("openai/gsm8k", unit * 30_000, "72")
    assert time.thread_time() - start < 20
