"""Rewards of parts of a response, on the tokens with which those parts are complete."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from valor.rewards.steps import as_steps, last_token, split_steps, token_rewards
from valor.rewards.worker import as_result


def decode(ids):
    """Tokens are bytes, and as byte-level BPE does it an unfinished character is shown as one sign; 0 is special."""
    return bytes(i for i in ids if i).decode(errors="replace")


def test_a_span_lands_on_the_token_that_writes_its_last_character():
    text = "a né b"
    ids = [0, *text.encode(), 0]  # é is two bytes, and special tokens write nothing
    assert [last_token(end, ids, text, decode) for end in range(1, 7)] == [1, 2, 3, 5, 6, 7]


def test_rewards_of_tokens_and_of_spans_of_two_rows_by_hand():
    rows = [list(b"ab"), list(b"cde")]
    steps = [(0, 1.0), (4, 2.0), ((0, 3), 4.0), ((1, 2), 8.0), ((4, 5), 16.0)]
    assert token_rewards(steps, rows, decode) == [[1.0, 8.0], [4.0, 0.0, 18.0]]


@given(st.text(max_size=20), st.data())
@settings(max_examples=100, deadline=None)
def test_against_prefixes_one_by_one(text, data):
    ids = list(text.replace("\0", "").encode(errors="ignore"))
    text = decode(ids)
    for end in range(1, len(text) + 1):
        plain = next(n for n in range(len(ids) + 1) if decode(ids[:n])[:end] == text[:end]) - 1
        assert last_token(end, ids, text, decode) == plain


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (3, "no token 3 in a response of 3"),
        (-1, "no token -1"),
        ((2, 4), "no characters 2 to 4 in a response of 3"),
        ((2, 2), "no characters 2 to 2"),
        ((-1, 2), "no characters -1 to 2"),
    ],
)
def test_a_place_that_the_response_does_not_have_is_one_error(place, message):
    with pytest.raises(ValueError, match=message):
        token_rewards([(place, 1.0)], [list(b"abc")], decode)


def test_tokens_that_spell_another_text_are_an_error():
    with pytest.raises(ValueError, match="do not spell"):
        last_token(3, list(b"abc"), "abd", decode)


def test_steps_end_with_a_separator_and_white_space_joins_the_step_before():
    text = "one\n\ntwo\n\n\n\nthree"
    assert [text[a:b] for a, b in split_steps(text, "\n\n")] == ["one\n\n", "two\n\n", "\n\nthree"]
    assert split_steps("one\n\n \n\n", "\n\n") == [(0, 5)]
    assert split_steps("", "\n") == []


def test_what_a_grader_returns_as_steps():
    result = as_result({"score": 1, "step_rewards": [[2, 0.5], ((0, 3), -1)], "pred": "x"}, 0.0, 0.0)
    assert result.steps == ((2, 0.5), ((0, 3), -1.0)) and result.components == {"pred": "x"}
    assert result.score == 1.0 and result.total == 0.5
    for wrong in (5, [1.0], [("a", 1.0)], [(1, "x")], [((1, 2, 3), 1.0)], [(1.5, 1.0)]):
        with pytest.raises(ValueError, match="as step_rewards: a list of"):
            as_steps(wrong)
    with pytest.raises(ValueError, match="not finite"):
        as_steps([(0, float("nan"))])


@pytest.mark.parametrize("value", [[1.0], (1.0, {"acc": 1}), None, "1.0", {"score": [1.0]}, torch.ones(2), b"1", 1j])
def test_what_is_no_score_is_shown(value):
    shown = re.escape(repr(value["score"] if isinstance(value, dict) else value)[:60])
    with pytest.raises(TypeError, match=f"the grader returned {shown}, not a number or a dict with 'score'"):
        as_result(value, 0.0, 0.0)


def test_what_a_grader_leaves_at_none_is_not_there():
    """It is neither an error, nor an answer that votes."""
    result = as_result({"score": 1.0, "error": None, "pred": None, "acc": True}, 0.0, -1.0)
    assert (result.score, result.error, result.components) == (1.0, None, {"acc": True})


@pytest.mark.parametrize("value", [10**400, 1e39, {"score": 1.0, "size": 10**400}, {"score": 1.0, "size": -1e39}])
def test_numbers_that_float32_does_not_have_are_an_error(value):
    """Scores are tensors, and components are averaged: neither could be."""
    with pytest.raises((ValueError, OverflowError)):
        as_result(value, 0.0, 0.0)
