"""Numbers that have to make a target: made here, each with a solution, so nothing is downloaded."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, combinations_with_replacement
from typing import Any

from valor.data.recipes.recipe import QUESTION, Example, Recipe, Record, value

_ANSWER = QUESTION + " Think inside <think> </think> and give the expression inside <answer> </answer>."
_OPERATIONS = ("+", "-", "*", "/")


def puzzle(record: Record) -> Example:
    """Numbers and a target (24 if none is given), as columns or as one text like `1 1 4 6`."""
    found: Any = value(record, "numbers", "nums", "Puzzles", "Puzzle")
    numbers = [int(n) for n in (found.split() if isinstance(found, str) else found)]
    target = int(record.get("target") or 24)
    question = (
        f"Using the numbers {', '.join(map(str, numbers))}, each exactly once, with + - * / and brackets, write an "
        f"expression that equals {target}."
    )
    extra = {"solution": record["solution"]} if record.get("solution") else {}
    return Example(question, {"target": target, "numbers": numbers}, extra)


def countdown(
    seed: int, numbers: str | int = "3-4", min_number: int = 1, max_number: int = 99, min_target: int = 10,
    max_target: int = 100,
) -> Iterator[Record]:  # fmt: skip
    """Solvable puzzles without end: random numbers, put together by random operations whose results are natural.

    Every number is used; `numbers` is how many there are, or a range. Raises ValueError when nothing can come of it.
    """
    fewest, _, most = str(numbers).partition("-")
    low, high = int(fewest), int(most or fewest)
    if not 2 <= low <= high or not 0 < min_number <= max_number or not 0 < min_target <= max_target:
        raise ValueError(
            "numbers must be 2 or more (3-4 is a range), and every minimum above 0 and not over its maximum"
        )
    # `random()` is the one method whose sequence Python keeps from version to version.
    draw = random.Random(seed).random
    missed = 0
    while missed < 100_000:
        drawn = [
            min_number + int(draw() * (max_number - min_number + 1))
            for _ in range(low + int(draw() * (high - low + 1)))
        ]
        made = _combine(drawn, draw)
        if made is None or not min_target <= made[0] <= max_target:
            missed += 1
            continue
        missed = 0
        yield {"numbers": drawn, "target": made[0], "solution": made[1]}
    raise ValueError("100,000 random puzzles in a row miss the target range: widen it")


def _combine(numbers: Sequence[int], draw: Any) -> tuple[int, str] | None:
    """A value that these numbers make by random operations, and how; None when one would leave the natural numbers."""
    pool = [(n, str(n)) for n in numbers]
    while len(pool) > 1:
        (a, left), (b, right) = (pool.pop(int(draw() * len(pool))) for _ in range(2))
        operation = _OPERATIONS[int(draw() * len(_OPERATIONS))]
        if (operation == "-" and a <= b) or (operation == "/" and a % b):
            return None
        result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[operation]
        pool.append((result, f"({left} {operation} {right})"))
    return pool[0][0], pool[0][1][1:-1]


def game24(seed: int) -> Iterator[Record]:
    """All 1,362 solvable hands of four numbers from 1 to 13, in an order drawn by `seed`."""
    hands = [(hand, solve(hand, 24)) for hand in combinations_with_replacement(range(1, 14), 4)]
    draw = random.Random(seed).random
    keyed = sorted((draw(), hand, solution) for hand, solution in hands if solution)
    return iter([{"numbers": list(hand), "target": 24, "solution": solution} for _, hand, solution in keyed])


def solve(numbers: Sequence[int], target: int | Fraction) -> str | None:
    """An expression with each number once that is exactly `target`; None when there is none.

    Takes some milliseconds for four numbers, seconds for six.
    """
    # The last operation joins two parts: for each value of the one, the other must make one of six.
    for some, rest in _parts(tuple(sorted(numbers))):
        for a, left in some.items():
            wanted = [(target - a, f"{left} + {{}}"), (a - target, f"{left} - {{}}"), (target + a, f"{{}} - {left}")]
            wanted += [(target * a, f"{{}} / {left}"), (Fraction(target) / a, f"{left} * {{}}")] if a else []
            wanted += [(a / target, f"{left} / {{}}")] if a and target else []
            for b, expression in wanted:
                if b in rest:
                    return expression.format(rest[b])
    return str(target) if [target] == list(numbers) else None


def _parts(numbers: tuple[int, ...]) -> Iterator[tuple[Mapping[Fraction, str], Mapping[Fraction, str]]]:
    """The values of both parts of every split in two."""
    places = range(len(numbers))
    for size in range(1, len(numbers) // 2 + 1):
        for chosen in combinations(places, size):
            yield (
                _reach(tuple(numbers[i] for i in chosen)),
                _reach(tuple(numbers[i] for i in places if i not in chosen)),
            )


@lru_cache(maxsize=10_000)
def _reach(numbers: tuple[int, ...]) -> Mapping[Fraction, str]:
    """Every value that all of these numbers make, with an expression for it."""
    if len(numbers) == 1:
        return {Fraction(numbers[0]): str(numbers[0])}
    reached: dict[Fraction, str] = {}
    for some, rest in _parts(numbers):
        for a, left in some.items():
            for b, right in rest.items():
                for made, expression in ((a + b, "+"), (a * b, "*"), (a - b, "-")):
                    reached.setdefault(made, f"({left} {expression} {right})")
                reached.setdefault(b - a, f"({right} - {left})")
                if b:
                    reached.setdefault(a / b, f"({left} / {right})")
                if a:
                    reached.setdefault(b / a, f"({right} / {left})")
    return reached


RECIPES = (
    Recipe(
        "countdown",
        "numbers that make a target: any number of solvable puzzles (--option numbers=3-4 max_target=100 …)",
        puzzle,
        "countdown",
        "math",
        _ANSWER,
        generate=countdown,
    ),
    Recipe(
        "game24",
        "Game of 24: the 1,362 solvable hands of four numbers from 1 to 13",
        puzzle,
        "game24",
        "math",
        _ANSWER,
        generate=game24,
        sizes=(1262, 100),
    ),
)
