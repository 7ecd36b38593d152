"""Search-R1's reward by hand."""

import pytest

from valor.rewards.search_r1 import INVALID_ACTION, grade, policy_text

TRUTH = {"target": ["Paris", "City of Paris"]}
SEARCH = "<think>who?</think>\n<search>France</search>\n\n<information>Doc 1(Title: {}) text\n</information>\n\n"
FOUND, MISSED = SEARCH.format("Paris"), SEARCH.format("Lyon")
WRONG = "<think>so</think> <answer>London</answer>\n"


@pytest.mark.parametrize(
    ("response", "score", "format_"),
    [
        ("<answer>Paris</answer>", 1, 1),
        ("<answer> the PARIS. </answer>", 1, 1),
        ("<answer>London</answer> no: <answer>Paris</answer>", 1, 1),
        ("<answer>It is Paris</answer>", 0, 1),
        ("Paris", 0, 0),
        ("<answer>Paris", 0, 0),
        ("Paris" + INVALID_ACTION + "Paris", 0, 0),  # the tags in it are not the policy's
        (INVALID_ACTION + "<answer>Paris</answer>" + INVALID_ACTION, 1, 1),
    ],
)
def test_search_r1_wants_the_exact_answer_in_its_tag(response: str, score: int, format_: int) -> None:
    result = grade("searchR1_nq", response, {"target": ["Paris", "City of Paris"]})
    assert (result["score"], result["format"]) == (score, format_)


def test_components() -> None:
    result = grade("searchR1_nq", MISSED + FOUND + WRONG, TRUTH)
    assert result == {
        **{"score": 0.0, "acc": 0.0, "em": 0.0, "f1": 0.0, "contains": 0.0, "format": 1.0},
        "pred": "london",
    }


def test_what_a_document_says_is_no_answer() -> None:
    trap = "<think>x</think><search>y</search><information>Doc <answer>Paris</answer></information>"
    for response in (trap, trap + "<think>so</think>Paris"):
        result = grade("searchR1_nq", response, TRUTH)
        assert (result["score"], result["format"]) == (0.0, 0.0)
    assert grade("searchR1_nq", trap + WRONG, TRUTH)["pred"] == "london"


def test_the_example_in_the_prompt_is_no_answer() -> None:
    """In Search-R1 the prompt is graded too: "Beijing" would be right without any answer."""
    assert grade("searchR1_nq", "<think>I give up.</think>", {"target": ["Beijing"]})["score"] == 0.0


@pytest.mark.parametrize("before", ["<think>so</think>", MISSED, "</search>" + INVALID_ACTION])
def test_documents_of_ones_own_hide_no_answer(before: str) -> None:
    result = grade("searchR1_nq", before + "<information>Paris <answer>London</answer></information>", TRUTH)
    assert result["pred"] == "london"


def test_documents_are_told_from_the_rest() -> None:
    text = "a</search><information>b</information>c</search>\n\n<information>d<information>e</information>f"
    assert policy_text(text) == "a</search>c</search>f"
    assert policy_text("a<information>b</information>c") == "a<information>bc"
    assert policy_text("a<information>b") == "a<information>b"
    assert policy_text("a</information>b") == "ab"
