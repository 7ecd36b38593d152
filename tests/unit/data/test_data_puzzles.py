"""Generated puzzles: solvable, all different, the same for the same seed."""

from itertools import islice
from pathlib import Path

import pytest

from valor.data.build import Request, prepare
from valor.data.files import read_rows
from valor.data.recipes import find_recipe
from valor.errors import UserError
from valor.rewards.countdown import evaluate

pytest.importorskip("reasoning_gym")


def test_countdown() -> None:
    recipe = find_recipe("countdown")
    assert recipe.generate is not None
    made = [recipe.convert(record) for record in islice(recipe.generate(0), 100)]
    assert {len(p.ground_truth["numbers"]) for p in made} == {3, 4}
    for puzzle in made:
        found = evaluate(puzzle.extra["solution"])
        assert found is not None and found.value == puzzle.ground_truth["target"] and 10 <= found.value <= 100
        assert sorted(found.numbers) == sorted(puzzle.ground_truth["numbers"])
        assert all(str(n) in puzzle.question for n in (*found.numbers, found.value))
    assert made == [recipe.convert(record) for record in islice(recipe.generate(0), 100)]
    more = islice(recipe.generate(0, min_numbers=5, max_numbers=5), 20)
    assert {len(recipe.convert(record).ground_truth["numbers"]) for record in more} == {5}
    tinyzero = recipe.convert({"nums": [44, 19, 35], "target": 98})
    assert tinyzero.ground_truth == {"numbers": [44, 19, 35], "target": 98}


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
    found = evaluate(row.extra_info["solution"])
    assert found is not None and found.value == row.ground_truth["target"]


def test_a_generator_that_has_too_few(tmp_path: Path) -> None:
    options = {"min_numbers": 2, "max_numbers": 2, "max_value": 3, "min_target": 2, "max_target": 4}
    lines = prepare(Request(find_recipe("countdown"), limit=1000, test_size=2, options=options), tmp_path)
    assert lines[-1].startswith("there are only ")
    for wrong in ({"number": 3}, {"min_numbers": 1}):
        with pytest.raises(UserError, match="countdown does not take these --option settings"):
            prepare(Request(find_recipe("countdown"), options=wrong), tmp_path / "wrong")
    impossible = {"max_value": 2, "min_target": 1000, "max_target": 1000}
    with pytest.raises(UserError, match=r"^countdown: "):
        prepare(Request(find_recipe("countdown"), options=impossible), tmp_path / "wrong")
    with pytest.raises(UserError, match="there are no rows to write"):
        prepare(Request(find_recipe("countdown"), limit=5, test_size=100, options=options), tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
