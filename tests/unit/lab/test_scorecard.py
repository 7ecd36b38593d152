"""The scorecard's numbers on responses small enough to work out by hand."""

import json

import pytest
import torch

from valor.lab.scorecard import Branches, Judged, scorecard


def judged(**changes) -> Judged:
    """Four answers to two prompts; the first two are right. The third has two turns, an observation between them."""
    given = {
        "values": torch.tensor(
            [[0.5, 0.6, 0.9, 0.0], [0.5, 0.7, 0.0, 0.0], [0.5, 0.9, 9.0, 0.2], [0.5, 0.4, 0.6, 0.0]]
        ),
        "returns": torch.tensor(
            [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
        ),
        "mask": torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]]),
        "right": torch.tensor([True, True, False, False]),
        "prompts": [0, 0, 1, 1],
    }
    return Judged(**(given | changes))


def test_verdicts_are_the_values_at_the_last_policy_token():
    card = scorecard(judged())
    assert card["responses"] == 4 and card["prompts"] == 2 and card["right"] == 0.5
    assert card["auc"]["value"] == 1.0  # 0.9 and 0.7 against 0.2 and 0.6
    assert card["calibration"]["last"]["ece"] == pytest.approx((0.1 + 0.3 + 0.2 + 0.6) / 4)


def test_explained_variance_is_of_policy_tokens_alone():
    card = scorecard(judged())
    v = [0.5, 0.6, 0.9, 0.5, 0.7, 0.5, 0.9, 0.2, 0.5, 0.4, 0.6]
    r = [1.0] * 5 + [0.0] * 6
    errors = torch.tensor(r) - torch.tensor(v)
    expected = 1 - errors.var(correction=0) / torch.tensor(r).var(correction=0)
    assert card["explained_variance"] == pytest.approx(float(expected), abs=1e-6)


def test_places_along_the_response():
    places = scorecard(judged())["positions"]
    assert [one["at"] for one in places] == [round(q / 10, 1) for q in range(11)]
    assert places[0]["auc"] == 0.5 and places[0]["right"] == {"low": 0.5, "mean": 0.5, "high": 0.5, "count": 2}
    assert places[-1]["right"]["mean"] == pytest.approx(0.8) and places[-1]["wrong"]["mean"] == pytest.approx(0.4)


def test_turns_end_where_the_policy_stops_writing():
    first, second = scorecard(judged())["turns"]
    assert (first["responses"], second["responses"]) == (4, 1)
    assert first["auc"] == 2.5 / 4  # right 0.9 and 0.7; wrong 0.9 and 0.6
    assert second["auc"] is None and second["wrong"]["mean"] == pytest.approx(0.2)


def test_a_constant_critic_is_at_chance_everywhere():
    card = scorecard(judged(values=torch.full((4, 4), 0.5)))
    assert card["auc"] == {"value": 0.5, "low": 0.5, "high": 0.5}
    assert {one["auc"] for one in card["positions"]} == {0.5}
    assert card["explained_variance"] == pytest.approx(0.0)
    assert card["calibration"]["last"]["ece"] == pytest.approx(0.0)


def test_the_interval_draws_prompts_with_all_their_answers():
    """Two prompts are two draws, however many answers they have: the critic gets one right and one wrong."""
    values = torch.tensor([[0.9], [0.1], [0.1], [0.9]]).repeat_interleave(50, 0)
    right = torch.tensor([True, False, True, False]).repeat_interleave(50)
    one = torch.ones(200, 1)
    found = scorecard(Judged(values, one * right[:, None], one, right, prompts=[0] * 100 + [1] * 100))["auc"]
    assert found == {"value": 0.5, "low": 0.0, "high": 1.0}


def test_without_wrong_answers_there_is_a_card_all_the_same():
    card = scorecard(judged(right=torch.ones(4, dtype=torch.bool)))
    assert card["auc"] == {"value": None, "low": None, "high": None}
    assert card["positions"][3]["wrong"] is None
    json.dumps(card, allow_nan=False)


def test_values_against_branches():
    branches = Branches(
        rows=torch.tensor([0, 0, 0, 2, 2, 3, 3]),
        tokens=torch.tensor([0, 1, 2, 0, 1, 0, 1]),
        # truth: ½, 1, 1 | 1, 0 | 1, 1
        returns=torch.tensor([[0.0, 1], [1, 1], [1, 1], [1, 1], [0, 0], [1, 1], [1, 1]]),
    )
    found = scorecard(judged(), branches)["monte_carlo"]
    assert found["points"] == 7 and found["responses"] == 3 and found["branches"] == 2
    # Response 0: V rises with the truth; response 2: it rises (0.5, 0.9) while the truth falls; response 3 is flat.
    assert found["agreement"]["responses"] == 2 and found["agreement"]["mean"] == 0.5
    assert found["agreement"]["p"] == 1.0
    assert found["abs_error"] == pytest.approx((0 + 0.4 + 0.1 + 0.5 + 0.9 + 0.5 + 0.6) / 7, abs=1e-6)
    assert found["scatter"]["truth"] == [0.5, 1, 1, 1, 0, 1, 1]
