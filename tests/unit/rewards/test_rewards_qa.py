"""Short answers: SQuAD's measures, and agreement with people."""

import json
from pathlib import Path
from typing import Any

import pytest

from valor.rewards.qa import aliases, f1_score, grade, normalize


def test_squad_normalization_and_f1() -> None:
    assert normalize("The  Eiffel-Tower, (Paris)!") == "eiffeltower paris"
    assert f1_score(["a", "b"], ["b", "c"]) == 0.5
    assert f1_score(["a"], ["b"]) == 0.0
    assert f1_score(["x", "y", "z"], ["x", "y", "z"]) == 1.0


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("Paris", "Paris", 1),
        ("JK Rowling", "J. K. Rowling", 1),
        ("It was J.K. Rowling.", "J. K. Rowling", 1),
        ("J. R. Rowling", "J. K. Rowling", 0),
        ("10 percent", "10%", 1),
        ("the paris.", "Paris", 1),
        ("The capital is Paris.", "Paris", 1),
        ("London", "Paris", 0),
        ("The president Obama", "Obama", 1),
        ("It is in Paris, of course.", "Paris", 0),
        ("It has 13 episodes.", "3", 0),
        ("36", "36.0", 1),
        ("It was formed on December 8, 1985.", "8 December 1985", 1),
        ("It is on March 15th.", "15 March", 1),
        ("1979-80", "the 1979\u201380 season", 0),
        ("The capital of Togo is Lom\u00e9.", "Lome", 1),
        ("It was awarded to Wilhelm R\u00f6ntgen in 1901.", "Wilhelm Conrad R\u00f6ntgen", 1),
        ("Malcolm and Donald Campbell", "Malcolm & Donald Campbell", 1),
        ("Wilhelm Tell", "Wilhelm Conrad R\u00f6ntgen", 0),
        ("John Nash", "John Forbes Nash", 1),
        ("John Forbes Nash Jr.", "John Nash", 0),
        ("It was Edward VII.", "Edward the Seventh", 1),
        ("Phoenix Mills Ltd", "Phoenix Mills Limited", 1),
        ("It is at 50 Massachusetts Ave NE", "50 Massachusetts Avenue NE", 1),
        ("He was twenty-one.", "21", 1),
        ("The The", "The The", 1),
        ("", "The The", 0),
        ("", "+", 0),
        ("a", "the", 0),
        ("George Huntington", "the physician George Huntington", 1),
        ("Echidnas", "Echidna (spiny anteater)", 1),
        ("It is 12.9 kilometers.", "12.9-kilometre", 1),
        ("", "Paris", 0),
        ("Yes, it is.", "yes", 1),
        ("No. There is no yes here.", "yes", 0),
        ("nothing", "no", 0),
        ("the party", "art", 0),
    ],
)
def test_one_answer_but_for_its_spelling(answer: str, truth: str, right: int) -> None:
    assert grade("nq", answer, [truth])["score"] == right
    assert grade("nq", f"<think>so</think> <answer>{answer}</answer>", truth)["score"] == right


def test_only_the_answer_tag_counts_where_there_is_one() -> None:
    result = grade("nq", "Paris or London? <answer>London</answer>", ["Paris"])
    assert result == {"score": 0.0, "em": 0.0, "f1": 0.0, "contains": 0.0, "format": 1.0, "pred": "london"}
    result = grade("nq", "The city of Paris", ["Paris", "City of Paris"])
    assert (result["score"], result["em"], result["f1"], result["format"]) == (1.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    "truth",
    [
        "Paris",
        ["Paris"],
        ("x", "Paris"),
        {"target": ["Paris"]},
        {"target": "Paris"},
        {"value": "Paris", "aliases": ["x"]},
    ],
)
def test_ground_truths(truth: Any) -> None:
    assert grade("nq", "<answer>Paris</answer>", truth)["score"] == 1.0


@pytest.mark.parametrize("truth", [None, "", [], {"target": []}, {"wrong": "Paris"}])
def test_a_ground_truth_without_an_answer_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match="no answer"):
        aliases(truth)


@pytest.mark.parametrize(
    ("answer", "truth", "exact", "contains"),
    [
        ("The capital is Paris, which is large.", "Paris", 1, 1),
        ("Celebrated on March 15th every year.", "15 March", 0, 1),
        ("The Secret of Crickley Hall has 3 episodes, of which one is long.", "3", 0, 1),
        ("Barack Obama Paris London Rome", "London", 0, 0),
        ("Paris, London, Rome, Madrid", "Paris", 0, 0),
        ("not Paris", "Paris", 0, 0),
        ("It is not London but Paris", "Paris", 0, 1),
        ("Paris is wrong", "Paris", 0, 0),
        ("法国的首都在美丽的巴黎", "巴黎", 0, 1),
        ("不是巴黎", "巴黎", 0, 0),
    ],
)
def test_containment_counts_where_a_row_asks_for_it(answer: str, truth: str, exact: int, contains: int) -> None:
    assert grade("nq", answer, truth)["score"] == exact
    assert grade("nq", answer, truth, {"match": "contains"})["score"] == contains


def test_f1_counts_where_a_row_asks_for_it() -> None:
    assert grade("nq", "Paris France", "Paris", {"match": "f1"})["score"] == pytest.approx(2 / 3)
    assert grade("nq", "not Paris", "Paris", {"match": "f1"})["score"] == 0.0
    assert grade("nq", "首都巴黎", "巴黎", {"match": "f1"})["score"] == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="match='exactly': it is one of exact, f1, contains"):
        grade("nq", "Paris", "Paris", {"match": "exactly"})


@pytest.mark.parametrize("match", ["exact", "contains", "f1"])
@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("Barack Obama Paris London Rome", "London"),
        ("Paris, London, Rome", "Paris"),
        ("Rome; Paris; London; Madrid", "Paris"),
        ("Paris or London", "Paris"),
        ("London and Paris", "Paris"),
        ("<answer>either Paris or London</answer>", "Paris"),
        ("1985, 1986, 1987, 1988", "1986"),
        ("巴黎、伦敦", "巴黎"),
        ("巴黎或伦敦", "巴黎"),
        ("not Paris", "Paris"),
        ("It is anything but Paris.", "Paris"),
        ("Paris is wrong", "Paris"),
        ("It isn't Wilhelm Conrad Röntgen.", "Wilhelm Conrad Röntgen"),
        ("不是巴黎", "巴黎"),
        ("", "Paris"),
        (" ", "+"),
        ("<answer></answer>", "Paris"),
        ("Is Paris the capital of France?", "Paris"),
        ("Which is larger, Paris or London?", "Paris"),
        ("巴黎是法国的首都吗?", "巴黎"),
    ],
)
def test_hostile_answers_are_wrong_whatever_a_row_asks_for(answer: str, truth: str, match: str) -> None:
    assert grade("nq", answer, truth, {"match": match})["score"] == 0.0


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("Sir Malcolm Campbell and his son Donald Campbell.", "Malcolm & Donald Campbell", 1),
        ("Sinclair owns Seattle\u2019s ABC affiliate KOMO-TV (Channel 4).", "KOMO-TV", 1),
        ("It was Röntgen, Wilhelm Conrad.", "Wilhelm Conrad Röntgen", 1),
        ("the posterior aspect", "on the posterior aspect", 1),
        ("in December 1986", "December 1985", 0),
        ("No. There is no yes here.", "yes", 0),
        ("Who rules France? Emmanuel Macron rules it.", "Emmanuel Macron", 1),
    ],
)
def test_what_people_find_in_a_text(answer: str, truth: str, right: int) -> None:
    assert grade("nq", answer, truth, {"match": "contains"})["score"] == right


def test_agreement_with_people(shared_dir: Path) -> None:
    """Of long answers people accept more than one name that is given; nothing that they refuse is right here."""
    lines = (shared_dir / "data" / "qa_graded_outputs_sample.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    agree = dict.fromkeys(("exact", "contains", "em"), 0)
    for row in rows:
        exact, contains = (
            grade(row["dataset"], row["output"], row["golds"], {"match": m}) for m in ("exact", "contains")
        )
        assert row["label"] or not exact["score"]
        for name, score in (("exact", exact["score"]), ("contains", contains["score"]), ("em", exact["em"])):
            agree[name] += bool(score) == row["label"]
    assert len(rows) == 307
    assert agree["em"] + 50 < agree["exact"] and agree["exact"] >= 0.65 * len(rows)
    assert agree["contains"] >= 0.938 * len(rows)
