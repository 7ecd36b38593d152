"""Countdown and the Game of 24: solutions of a solver in every way of writing them, and the same ones corrupted."""

import csv
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from valor.rewards.countdown import evaluate, final_expression, grade

HAND = "1 1 4 6"

RIGHT = [
    "4*6+1-1",
    "4 * 6 + 1 - 1 = 24",
    "24 = 4*6+1-1",
    "<answer>4*6+1-1</answer>",
    "<answer>(4*6) + 1 - 1 = 24</answer>",
    "<think>1+1 = 2, no</think> <answer>4*6*1/1</answer>",
    "Steps:\n1 - 1 = 0 (left: 0 4 6)\n4 * 6 = 24 (left: 0 24)\n0 + 24 = 24 (left: 24)\nAnswer: 4 * 6 + (1 - 1) = 24",
    r"\boxed{4 \times 6 + 1 - 1}",
    r"$4 \cdot 6 + 1 - 1 = 24$",
    r"\(\frac{4 \times 6}{1} \times 1\)",
    "Answer: **4*6+1-1**",
    "**Answer:** 4 * 6 * 1 / 1",
    "Answer:\n4*6+1-1",
    "The answer is 4\u00d76\u00d71\u00f71 = 24.",
    "-(1-1)+4*6",
    "[4*6+1]-1",
    "(4*6+1)-1 = 25 - 1 = 24",
    "So the solution is 4*6+1-1",
]
WRONG = [
    "4*6",  # two numbers left
    "4*6+1+1-1-1",  # used twice
    "4*6+1-1-0",  # one that was not given
    "11+4*6-11",
    "46-11-11",  # digits put together
    "4*6+1-1+1",
    "4**1*6*1",
    "4^1*6*1",
    "4*6*1//1",
    "4*6*1%1",
    "4!*1*(6-6+1)",
    "(4*6+1-1)!",
    "round(4*6+1-1)",
    "4*6+1-1 ^ 1",
    "4*6+1/(1-1)",  # no value
    "24",
    "",
    "Answer: not possible",
    "(4*6+1-1",
    "4*6+1-1)",
    "2(3+9)",
    "4 6 1 1",
    "4.0*6+1-1",
    "True*24",
    "eval('24')",
    "4*6+1-1+0*__import__('os').getpid()",
    "4*6+1-1 = 24\nAnswer: 4 * 6 = 24",  # the announced one counts
    "Steps:\n1 - 1 = 0 (left: 0 4 6)\n4 * 6 = 24 (left: 0 24)\n0 + 24 = 24 (left: 24)",  # no expression of all four
]


@pytest.mark.parametrize("response", RIGHT)
def test_ways_to_write_a_solution(response: str) -> None:
    result = grade("game24", response, HAND)
    assert (result["score"], result["format"], result["numbers"]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("response", WRONG)
def test_what_is_no_solution(response: str) -> None:
    assert grade("game24", response, HAND)["score"] == 0.0


def test_components_tell_what_is_wrong() -> None:
    assert grade("game24", "4*6+1+1", HAND) == {"score": 0.0, "format": 1.0, "numbers": 1.0, "pred": "4*6+1+1"}
    assert grade("game24", "4 * 6", HAND) == {"score": 0.0, "format": 1.0, "numbers": 0.0, "pred": "4*6"}
    assert grade("game24", "no", HAND) == {"score": 0.0, "format": 0.0, "numbers": 0.0, "pred": ""}


@pytest.mark.parametrize(
    ("truth", "extra"),
    [
        ({"target": 24, "numbers": [1, 1, 4, 6]}, {}),
        ({"target": "24", "nums": "1 1 4 6"}, None),
        ("24", {"numbers": [1, 1, 4, 6]}),
        (24, {"nums": [1, 1, 4, 6]}),
        ([1, 1, 4, 6], {}),
        ("1, 1, 4, 6", {"target": 24}),
        ("1 1 4 6", None),
    ],
)
def test_ground_truths(truth: Any, extra: Any) -> None:
    assert grade("countdown", "4*6+1-1", truth, extra)["score"] == 1.0
    assert grade("countdown", "4*6+1-1", {"target": 25, "numbers": [1, 1, 4, 6]})["score"] == 0.0


def test_a_ground_truth_without_numbers_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no numbers"):
        grade("countdown", "4*6", "24")


def test_arithmetic_is_exact() -> None:
    assert grade("countdown", "8/(3-8/3)", "3 3 8 8")["score"] == 1.0
    assert grade("countdown", "8/(3-2.6666666)", "3 3 8 8")["score"] == 0.0
    expression = evaluate("1/3+1/3+1/3")
    assert expression is not None and expression.value == 1
    assert evaluate("2**3") is None and evaluate("a+1") is None and evaluate("1+" * 300) is None
    assert final_expression("(1+2)*3 = 9") == "(1+2)*3"


def solve(numbers: tuple[int, ...]) -> str | None:
    """One solution by trying everything; independent of the code under test."""

    def search(values: list[tuple[Fraction, str]]) -> str | None:
        if len(values) == 1:
            return values[0][1][1:-1] if values[0][0] == 24 else None
        for (i, (a, x)), (j, (b, y)) in permutations(enumerate(values), 2):
            rest = [v for k, v in enumerate(values) if k not in (i, j)]
            made = [(a - b, f"({x} - {y})")] + ([(a / b, f"({x} / {y})")] if b else [])
            made += [(a + b, f"({x} + {y})"), (a * b, f"({x} * {y})")] if i < j else []
            for value in made:
                found = search([*rest, value])
                if found:
                    return found
        return None

    return search([(Fraction(n), str(n)) for n in numbers])


WRITINGS: list[Callable[[str], str]] = [
    lambda s: s,
    lambda s: f"{s} = 24",
    lambda s: f"Steps:\n1 + 1 = 2 (left: 2)\nAnswer: {s} = 24",
    lambda s: f"<think>maybe 3 * 8 = 24</think>\n<answer>{s}</answer>",
    lambda s: f"The expression is $${s.replace('*', chr(92) + 'times ')} = 24$$",
    lambda s: s.replace("*", "\u00d7").replace("/", "\u00f7").replace(" ", ""),
]


def corruptions(solution: str, draw: random.Random) -> list[str]:
    """Near misses: another operator, another number, one more, one less, a power, a wrong claim."""
    tokens = solution.replace("(", "( ").replace(")", " )").split()
    numbers = [i for i, t in enumerate(tokens) if t.isdigit()]
    signs = [i for i, t in enumerate(tokens) if t in ("+", "-", "*", "/")]
    i, sign = draw.choice(numbers), draw.choice(signs)

    def changed(place: int, token: str) -> str:
        return " ".join(token if k == place else t for k, t in enumerate(tokens))

    return [
        changed(i, str(int(tokens[i]) + 1)) + " = 24",
        changed(sign, {"+": "-", "-": "+", "*": "+", "/": "*"}[tokens[sign]]) + " = 24",
        f"({solution}) * 1 = 24",
        f"{solution} + 0",
        changed(sign, "**"),
        f"({solution}",
        f"{solution} = 24\nAnswer: {solution} + 1 = 24",
        f"round({solution})",
    ]


def test_every_hand_of_the_game_of_24(shared_dir: Path) -> None:
    with (shared_dir / "data" / "game24_1362.csv").open() as file:
        hands = [row["Puzzles"] for row in csv.DictReader(file)]
    assert len(hands) == 1362
    draw = random.Random(0)
    wrong = 0
    for k, hand in enumerate(draw.sample(hands, 400)):
        numbers = tuple(map(int, hand.split()))
        solution = solve(numbers)
        assert solution is not None
        assert grade("game24", WRITINGS[k % len(WRITINGS)](solution), hand)["score"] == 1.0
        for bad in corruptions(solution, draw):
            uses = sorted(int(n) for n in "".join(c if c.isdigit() else " " for c in bad.split("=")[0]).split())
            if uses == sorted(numbers) and "**" not in bad and "round" not in bad and bad.count("(") == bad.count(")"):
                value = evaluate(bad.split("=")[0])  # another operator may happen to make 24 as well
                if value and value.value == 24 and "Answer" not in bad:
                    continue
            assert grade("game24", bad, hand)["score"] == 0.0, (bad, hand)
            wrong += 1
    assert wrong > 3000
