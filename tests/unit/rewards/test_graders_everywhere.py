"""Every grader, in the main thread, in another thread and in a grader process: the same verdict, soon, no exception.

On the graded outputs of real models, on hostile text, and on text made of what the graders look for.
"""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valor.rewards import compute_score
from valor.rewards.executor import RewardExecutor, Sample

TRUTHS: dict[str, Any] = {
    "math": r"\frac{1}{2}",
    "openai/gsm8k": "42",
    "openai/gsm8k-flexible": "42",
    "valor/arithmetic": "42",
    "cais/mmlu": "B",
    "nq": ["Paris", "City of Paris"],
    "searchR1_nq": {"target": ["Paris"]},
    "countdown": {"target": 24, "numbers": [1, 1, 4, 6]},
    "hiyouga/geometry3k": "(1,2]",
}
MEGABYTE = 10**6
HOSTILE = {
    "power": r"\boxed{9^{9^{9^{9}}}}",
    "integral": r"\boxed{\int_0^{\infty} e^{-x^x} \sin(x^3) \, dx}",
    "nesting": r"\boxed{" + r"\frac{1}{" * 2000 + "2" + "}" * 2001,
    "brackets": "The answer is " + "(" * 50_000 + "1" + ")" * 50_000,
    "null bytes": "\0" * 1000 + r"The answer is \boxed{" + "\0" + "}",
    "unicode": "\u202e答案是\u0301\u0301٤٢ 😀 ½ \ud800 \ufeff" * 100,
    "nothing": "",
}
LONG = "9", "-1", "{", "Paris ", r"\boxed{1}", "The answer is 5. "
PIECES = [
    r"\boxed{", r"\frac{", r"\sqrt[", r"\text{", "}", "{", "(", ")", "[", "]", "$", "####", "the answer is", "Answer:",
    "<answer>", "</answer>", "<think>", "</think>", "**", "^", "_", "\\", ",", ".", "%", "-", "=", "<", r"\le", "and",
    "1", "42", "1/2", "0.5", "1e9", "x", r"\pi", r"\infty", "B", "(B)", "Paris", "one half", "4*6+1-1", "!", "\n", " ",
]  # fmt: skip
GENERATED = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=40).map("".join)


def verdict(sample: Sample) -> float | None:
    """The score; None where a grader says that it could not decide."""
    start = time.thread_time()  # others use the machine too
    result: Any = compute_score(*sample)
    assert time.thread_time() - start < 2, sample
    assert math.isfinite(result["score"])
    return None if result.get("error") else result["score"]


def check_everywhere(samples: list[Sample]) -> None:
    here = [verdict(sample) for sample in samples]
    with ThreadPoolExecutor(1) as threads:
        assert list(threads.map(verdict, samples)) == here
    with RewardExecutor(num_workers=1, timeout=60) as executor:
        results = executor.score(samples)
    assert {result.kind for result in results if result.error} <= {"undecided"}
    assert [None if result.error else result.score for result in results] == here


@pytest.mark.parametrize(("name", "truth"), [("math", "gold"), ("qa", "golds")])
def test_outputs_of_real_models(shared_dir: Path, name: str, truth: str) -> None:
    lines = (shared_dir / "data" / f"{name}_graded_outputs_sample.jsonl").read_text().splitlines()
    source = {"math": "math", "qa": "nq"}[name]
    check_everywhere([Sample(source, row["output"], row[truth]) for row in map(json.loads, lines)])


def test_hostile_text() -> None:
    compute_score("math", r"\boxed{\int_0^1 y dy}", r"\int_0^1 x dx")  # the import of computer algebra
    check_everywhere([Sample(source, text, truth) for source, truth in TRUTHS.items() for text in HOSTILE.values()])


@pytest.mark.parametrize("piece", LONG)
def test_a_megabyte(piece: str) -> None:
    for source, truth in TRUTHS.items():
        assert verdict(Sample(source, piece * (MEGABYTE // len(piece)), truth)) in (None, 0.0, 1.0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(GENERATED, st.sampled_from(sorted(TRUTHS)))
def test_generated_text(text: str, source: str) -> None:
    assert verdict(Sample(source, text, TRUTHS[source])) in (None, 0.0, 0.1, 0.9, 1.0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(GENERATED, GENERATED)
def test_generated_ground_truths(text: str, truth: str) -> None:
    assert verdict(Sample("math", text, truth + "1")) in (None, 0.0, 1.0)
