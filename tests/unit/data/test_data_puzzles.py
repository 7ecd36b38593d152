"""Generated puzzles: solvable, all different, the same for the same seed; the solver against a plain search."""

import ast
import csv
import operator
from fractions import Fraction
from itertools import islice, permutations
from pathlib import Path

import pytest

from valor.data.build import Request, prepare
from valor.data.files import read_rows
from valor.data.recipes import find_recipe
from valor.data.recipes.puzzles import countdown, game24, solve
from valor.errors import UserError

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """Its exact value and its numbers, by Python's own parser."""

    def walk(node: ast.expr) -> tuple[Fraction, list[int]]:
        if isinstance(node, ast.BinOp):
            (a, left), (b, right) = walk(node.left), walk(node.right)
            return OPERATIONS[type(node.op)](a, b), left + right
        assert isinstance(node, ast.Constant) and isinstance(node.value, int)
        return Fraction(node.value), [node.value]

    return walk(ast.parse(expression, mode="eval").body)


def makes_24(numbers: tuple[Fraction, ...]) -> bool:
    """Put any two together, in any way, until one is left."""
    if len(numbers) == 1:
        return numbers[0] == 24
    for a, b, *rest in permutations(numbers):
        results = [a + b, a - b, a * b] + ([a / b] if b else [])
        if any(makes_24((r, *rest)) for r in results):
            return True
    return False


def test_game24_is_the_published_set(shared_dir: Path) -> None:
    with open(shared_dir / "data" / "game24_1362.csv") as stream:
        published = {tuple(sorted(map(int, row["Puzzles"].split()))) for row in csv.DictReader(stream)}
    made = list(game24(0))
    assert {tuple(p["numbers"]) for p in made} == published
    assert len(made) == len(published) == 1362
    for puzzle in made:
        value, numbers = evaluate(puzzle["solution"])
        assert value == 24 and sorted(numbers) == sorted(puzzle["numbers"])


def test_the_solver_agrees_with_a_plain_search() -> None:
    for hand in [(1, 1, 1, 1), (3, 3, 8, 8), (1, 5, 5, 5), (1, 1, 1, 8), (13, 13, 13, 13), (4, 4, 10, 10)]:
        assert (solve(hand, 24) is not None) == makes_24(tuple(Fraction(n) for n in hand)), hand
    assert solve([7], 7) == "7" and solve([7], 8) is None
    assert evaluate(solve([3, 7, 25, 50], 82) or "")[0] == 82
    assert solve([1, 1], 0) == "1 - 1"  # zero is a target like any other


def test_countdown() -> None:
    made = list(islice(countdown(0), 500))
    assert {len(p["numbers"]) for p in made} == {3, 4}
    for puzzle in made:
        value, numbers = evaluate(puzzle["solution"])
        assert value == puzzle["target"] and 10 <= value <= 100
        assert sorted(numbers) == sorted(puzzle["numbers"]) and 1 <= min(numbers) <= max(numbers) <= 99
    assert made == list(islice(countdown(0), 500)) and made != list(islice(countdown(1), 500))
    assert {len(p["numbers"]) for p in islice(countdown(0, numbers=5), 20)} == {5}


def test_the_test_set_does_not_depend_on_how_many_are_for_training(tmp_path: Path) -> None:
    for name, limit in (("few", 20), ("many", 200)):
        request = Request(find_recipe("countdown"), limit=limit, test_size=30)
        assert prepare(request, tmp_path / name)[0].endswith(f"train.parquet: {limit} rows")
    few, many = (read_rows(tmp_path / name / "test.parquet") for name in ("few", "many"))
    assert [r.messages for r in few] == [r.messages for r in many] and len(few) == 30
    texts = [
        r.messages[0]["content"]
        for split in ("train", "test")
        for r in read_rows(tmp_path / "many" / f"{split}.parquet")
    ]
    assert len(set(texts)) == 230
    row = few[0]
    assert row.data_source == "countdown" and set(row.ground_truth) == {"target", "numbers"}
    assert evaluate(row.extra_info["solution"])[0] == row.ground_truth["target"]


def test_a_generator_that_has_too_few(tmp_path: Path) -> None:
    options = {"numbers": 2, "max_number": 3, "min_target": 2, "max_target": 4}
    lines = prepare(Request(find_recipe("countdown"), limit=1000, test_size=2, options=options), tmp_path)
    assert lines[-1].startswith("there are only ")
    for wrong, words in (
        ({"number": 3}, "takes numbers, min_number, max_number, min_target, max_target; got --option number"),
        ({"numbers": 1}, "numbers must be 2 or more"),
        ({"min_target": 1000, "max_target": 1000, "max_number": 2}, "miss the target range"),
    ):
        with pytest.raises(UserError, match=words):
            prepare(Request(find_recipe("countdown"), options=wrong), tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
