"""Search-R1's reward by hand: the answer, the form of the search, and what it found."""

from functools import partial
from typing import Any

import pytest

from valor.config import RewardConfig
from valor.rewards import compute_score
from valor.rewards.manager import make_graders
from valor.rewards.search_r1 import INVALID_ACTION, grade, split_documents, well_formed
from valor.rewards.worker import Sample

TRUTH = {"target": ["Paris", "City of Paris"]}
SEARCH = "<think>who?</think>\n<search>France</search>\n\n<information>Doc 1(Title: {}) text\n</information>\n\n"
FOUND, MISSED = SEARCH.format("Paris"), SEARCH.format("Lyon")
ANSWER, WRONG = "<think>so</think><answer>the PARIS.</answer>", "<think>so</think> <answer>London</answer>\n"


@pytest.mark.parametrize(
    ("response", "score", "format_"),
    [
        ("<answer>Paris</answer>", 1, 1),
        ("<answer> the PARIS. </answer>", 1, 1),
        ("<answer>London</answer> no: <answer>Paris</answer>", 1, 1),
        ("<answer>It is Paris</answer>", 0, 1),
        ("Paris", 0, 0),
        ("<answer>Paris", 0, 0),
    ],
)
def test_search_r1_wants_the_exact_answer_in_its_tag(response: str, score: int, format_: int) -> None:
    result = grade("searchR1_nq", response, {"target": ["Paris", "City of Paris"]})
    assert (result["score"], result["format"]) == (score, format_)


# Scores of qa_em_format.py with structure 0.2, final format 0.1, retrieval 0.05.
@pytest.mark.parametrize(
    ("response", "score"),
    [
        (ANSWER, 1.0),
        (FOUND + ANSWER, 1.0),
        (MISSED + FOUND + ANSWER, 1.0),
        ("Well: " + ANSWER, 0.8),  # right, in no form
        ("<answer>Paris</answer>", 0.8),
        (FOUND + "<answer>Paris</answer>", 0.8),  # no thought after the information
        (FOUND + ANSWER + " Indeed.", 0.8),
        (WRONG, 0.2),
        (MISSED + WRONG, 0.2),
        (FOUND + WRONG, 0.25),
        (MISSED + FOUND + WRONG, 0.25),
        ("London. " + FOUND + WRONG, 0.1),
        ("<answer>London</answer>", 0.1),
        (FOUND, 0.0),
        ("", 0.0),
        ("Paris", 0.0),
        ("Paris" + INVALID_ACTION + "Paris", 0.0),  # the tags in it are not the policy's
        (FOUND + WRONG + INVALID_ACTION, 0.1),
        ("hm" + INVALID_ACTION + "<answer>Paris</answer>" + INVALID_ACTION, 0.8),
    ],
)
def test_what_form_and_retrieval_are_worth(response: str, score: float) -> None:
    shaped = partial(grade, structure_format_score=0.2, final_format_score=0.1, retrieval_score=0.05)
    assert shaped("searchR1_nq", response, TRUTH)["score"] == pytest.approx(score)
    plain = compute_score("searchR1_nq", response, TRUTH)
    assert isinstance(plain, dict) and plain["score"] == float(score >= 0.8) == plain["acc"]


def test_components() -> None:
    result = grade("searchR1_nq", MISSED + FOUND + WRONG, TRUTH)
    assert result == {
        **{"score": 0.0, "acc": 0.0, "em": 0.0, "f1": 0.0, "contains": 0.0, "format": 1.0},
        **{"well_formed": 1.0, "retrieved": 1.0, "searches": 2.0, "pred": "london"},
    }


def test_what_a_document_says_is_no_answer() -> None:
    trap = "<think>x</think><search>y</search><information>Doc <answer>Paris</answer></information>"
    for response in (trap, trap + "<think>so</think>Paris"):
        result = grade("searchR1_nq", response, TRUTH)
        assert (result["score"], result["format"], result["retrieved"]) == (0.0, 0.0, 1.0)
    assert grade("searchR1_nq", trap + WRONG, TRUTH)["pred"] == "london"


def test_the_example_in_the_prompt_is_no_answer() -> None:
    """In Search-R1 the prompt is graded too: "Beijing" would be right without any answer."""
    assert grade("searchR1_nq", "<think>I give up.</think>", {"target": ["Beijing"]})["score"] == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think>",
        "<answer>a</answer>",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        "<think>a</think><search>b</search><think>c</think><answer>d</answer>",
        "<think>a</think><search>b</search><information>c</information><answer>d</answer>",
        "<think>a<think>b</think><answer>c</answer>",
        "<think>a</think>b<answer>c</answer>",
        "<think>a</think><answer>b",
        "</think><answer>b</answer>",
    ],
)
def test_forms_that_do_not_count(text: str) -> None:
    assert not well_formed(text)


@pytest.mark.parametrize(
    ("before", "searches"),
    [("<think>so</think>", 0), (MISSED, 1), ("</search>" + INVALID_ACTION, 0)],
)
def test_documents_of_ones_own_find_nothing_and_hide_no_answer(before: str, searches: int) -> None:
    result = grade("searchR1_nq", before + "<information>Paris <answer>London</answer></information>", TRUTH)
    assert (result["retrieved"], result["searches"], result["pred"]) == (0, searches, "london")


def test_documents_are_told_from_the_rest() -> None:
    told = "a</search><information>b</information>c</search>\n\n<information>d<information>e</information>f"
    assert split_documents(told) == ("a</search>c</search>\n\nf", ["b", "d<information>e"])
    assert split_documents("a<information>b</information>c") == ("abc", [])
    assert split_documents("a<information>b") == ("a<information>b", [])
    assert split_documents("a</information>b") == ("a</information>b", [])


def test_the_options_are_reward_kwargs() -> None:
    custom: dict[str, Any] = {"path": "pkg://valor.rewards.search_r1", "name": "grade"}
    kwargs = {"structure_format_score": 0.2, "final_format_score": 0.1, "retrieval_score": 0.05}
    graders = make_graders(RewardConfig(num_workers=1, custom_reward_function={**custom, "reward_kwargs": kwargs}))
    try:
        (result,) = graders.score([Sample("searchR1_nq", FOUND + WRONG, TRUTH)])
    finally:
        graders.close()
    assert result.error is None and result.score == pytest.approx(0.25) and not result.correct
