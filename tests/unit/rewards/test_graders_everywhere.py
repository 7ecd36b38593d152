"""Every grader, in the main thread, in another thread and in a grader process: the same verdict, soon, no exception.

On the graded outputs of real models, on hostile text, and on text made of what the graders look for.
"""

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valor.rewards import compute_score, mathematics
from valor.rewards.executor import RewardExecutor, Sample

pytestmark = pytest.mark.slow

TRUTHS: dict[str, Any] = {
    "math": "42",
    "hiyouga/geometry3k": "42",
    "openai/gsm8k": "42",
    "openai/gsm8k-flexible": "42",
    "valor/arithmetic": "42",
    "cais/mmlu": "B",
    "nq": ["Paris", "City of Paris"],
    "searchR1_nq": {"target": ["Paris"]},
    "countdown": {"target": 24, "numbers": [1, 1, 4, 6]},
}
MEGABYTE = 10**6
HOSTILE = {
    "digits": "9" * 100_000,
    "digits in a box": "\\boxed{" + "9" * 100_000 + "}",
    "parentheses": "\\boxed{" + "(" * 5000 + "1" + ")" * 5000 + "}",
    "open parentheses": "(" * 100_000,
    "tower": "\\boxed{9^{9^{9^9}}}",
    "flat tower": "\\boxed{9^9^9^9}",
    "python tower": "\\boxed{9**9**9**9}",
    "large power": "\\boxed{7^{123456789}}",
    "large base": "\\boxed{(10^{9})^{(10^9)}}",
    "factorial": "\\boxed{99999999!}",
    "factorial of a factorial": "\\boxed{((20!)!)!}",
    "factorial to a factorial": "\\boxed{2000!^{2000!}}",
    "binomial": "\\boxed{\\binom{10^9}{5\\cdot 10^8}}",
    "open boxes": "\\boxed{" * 10_000,
    "boxes": "\\boxed{5}" * 10_000,
    "loop": "52 inches - 4.25 feet = " * 5000,
    "announced loop": "The answer is 5. " * 8000,
    "announcements": "answer is " * 10_000,
    "nested fractions": "\\boxed{" + "\\frac{1}{" * 300 + "2" + "}" * 301,
    "nested roots": "\\boxed{" + "\\sqrt{" * 400 + "2" + "}" * 401,
    "nested functions": "\\boxed{" + "\\sin(\\cos(" * 100 + "x" + "))" * 100 + "}",
    "sum": "\\boxed{\\sum_{n=1}^{10^{12}} \\frac{1}{n^2}}",
    "product": "\\boxed{\\prod_{k=1}^{1000000} k}",
    "integral": "\\boxed{\\int_0^{\\infty} e^{-x^x} \\sin(x^3) \\, dx}",
    "limit": "\\boxed{\\lim_{x\\to\\infty} (1+1/x)^{x^{x^x}}}",
    "expansion": "\\boxed{(x+y+z)^{300}(x-y)^{300}}",
    "long list": "\\boxed{" + ",".join(map(str, range(2000))) + "}",
    "matrix": "\\boxed{\\begin{pmatrix}" + "\\\\".join(["&".join("1" * 30)] * 30) + "\\end{pmatrix}}",
    "equation": "\\boxed{x^5+y^5+z^5=x y z \\sin(x) \\cos(y)}",
    "signs": "\\boxed{" + "\\pm 1," * 500 + "}",
    "holes": "\\boxed{" + ", ".join(f"x\\neq {i}" for i in range(60)) + "}",
    "unions": "\\boxed{" + "(1,2)\\cup" * 150 + "(3,4)}",
    "chain": "\\boxed{" + "1<" * 500 + "x}",
    "exponent": "\\boxed{1e999999999}",
    "dollars": "$" * 100_000,
    "unclosed formulas": "\\(" * 50_000,
    "hashes": "####" * 30_000,
    "symbols": "∞√²" * 20_000,
    "spaces": " " * 100_000,
    "braces": "\\boxed" + "{" * 100_000,
    "thoughts": "<think>" * 10_000,
    "tags": "<answer>" * 10_000,
    "arithmetic": "Answer: " + "1+" * 40_000 + "1",
    "words after a number": "\\boxed{5 " + "ab " * 600 + "!}",
    "long word after a number": "\\boxed{5 " + "ab" * 900 + "!}",
    "null bytes": "\0" * 1000 + r"The answer is \boxed{" + "\0" + "}",
    "unicode": "\u202e答案是\u0301\u0301٤٢ 😀 ½ \ud800 \ufeff" * 100,
    "nothing": "",
}
FORMULAS = [
    "tower", "python tower", "large base", "factorial to a factorial", "binomial", "nested fractions",
    "nested functions",
    "sum", "integral", "limit", "expansion", "equation", "holes", "exponent", "open boxes", "loop",
]  # fmt: skip
FORMULA_TRUTHS = ["x^2+1", "1<x<2", "\\{1,2\\}", "x^2+y^2=1", "9^{9^{9^{9}}}", "\\int_0^1 x^2 dx", "\\sum_{k=1}^n k^2"]
DECIDED = [
    (r"\boxed{\frac{2}{4}}", "0.5", 1),
    (r"\boxed{x=3}", "4", 0),
    (r"\boxed{(2,\infty)}", "x>2", 1),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", 1),
    (r"\boxed{\gcd(12,18)}", "6", 1),
    (r"\boxed{\gcd(12,18)}", "7", 0),
    (r"\boxed{9^{9^{9^9}}}", "42", 0),
    ("(" * 10_000, "42", 0),
]
LONG = "9", "-1", "{", "Paris ", r"\boxed{1}", "The answer is 5. "
PIECES = [
    r"\boxed{", r"\frac{", r"\sqrt[", r"\text{", "}", "{", "(", ")", "[", "]", "$", "####", "the answer is", "Answer:",
    "<answer>", "</answer>", "<think>", "</think>", "**", "^", "_", "\\", ",", ".", "%", "-", "=", "<", r"\le", "and",
    "1", "42", "1/2", "0.5", "1e9", "x", r"\pi", r"\infty", "B", "(B)", "Paris", "one half", "4*6+1-1", "!", "\n", " ",
]  # fmt: skip
ENDLESS = 30  # seconds of computing that no machine needs where the limits hold
GENERATED = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=40).map("".join)


@pytest.fixture(autouse=True, scope="module")
def computer_algebra(patient_graders: None) -> Iterator[None]:
    """Imported before anything is timed: on a slow machine the import alone takes seconds. With its usual limit."""
    compute_score("math", r"\boxed{\int_0^1 y dy}", r"\int_0^1 x dx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mathematics, "SECONDS", 1.3)
        yield


def verdict(sample: Sample) -> float | None:
    """Whether it is right; None where a grader says that it could not decide."""
    start = time.thread_time()  # others use the machine too
    result: Any = compute_score(*sample[:4])
    assert time.thread_time() - start < ENDLESS, sample
    assert math.isfinite(result["score"])
    return None if result.get("error") else result.get("acc", result["score"])


def check_everywhere(samples: list[Sample]) -> list[float | None]:
    """The verdicts, here and elsewhere the same; where one is None (a loaded machine) that of another."""
    here = [verdict(sample) for sample in samples]
    with ThreadPoolExecutor(1) as threads:
        in_thread = list(threads.map(verdict, samples))
    with RewardExecutor(num_workers=1, timeout=600) as executor:
        results = executor.score(samples)
    assert {result.kind for result in results if result.error} <= {"undecided"}
    in_process = [None if r.error else r.components.get("acc", r.score) for r in results]
    found = [set(verdicts) - {None} for verdicts in zip(here, in_thread, in_process, strict=True)]
    assert all(len(verdicts) <= 1 for verdicts in found)
    return [next(iter(verdicts), None) for verdicts in found]


@pytest.mark.parametrize(("name", "truth"), [("math", "gold"), ("qa", "golds")])
def test_outputs_of_real_models(shared_dir: Path, name: str, truth: str) -> None:
    lines = (shared_dir / "data" / f"{name}_graded_outputs_sample.jsonl").read_text().splitlines()
    source = {"math": "math", "qa": "nq"}[name]
    check_everywhere([Sample(source, row["output"], row[truth]) for row in map(json.loads, lines[::4])])


def test_what_computer_algebra_decides_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "SECONDS", 30.0)
    verdicts = check_everywhere([Sample("math", text, truth) for text, truth, _ in DECIDED])
    assert verdicts == [right for _, _, right in DECIDED]


@pytest.mark.alone
def test_hostile_text_ends_and_raises_nothing() -> None:
    samples = [Sample(source, text, truth) for source, truth in TRUTHS.items() for text in HOSTILE.values()]
    samples += [Sample("math", HOSTILE[name], truth) for truth in FORMULA_TRUTHS for name in FORMULAS]
    for sample in samples:
        assert not verdict(sample), sample


@pytest.mark.parametrize("piece", LONG)
def test_a_megabyte(piece: str) -> None:
    for source, truth in TRUTHS.items():
        assert verdict(Sample(source, piece * (MEGABYTE // len(piece)), truth)) in (None, 0.0, 1.0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(GENERATED, st.sampled_from(sorted(TRUTHS)))
def test_generated_text(text: str, source: str) -> None:
    assert verdict(Sample(source, text, TRUTHS[source])) in (None, 0.0, 1.0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(GENERATED, GENERATED)
def test_generated_ground_truths(text: str, truth: str) -> None:
    assert verdict(Sample("math", text, truth + "1")) in (None, 0.0, 1.0)
