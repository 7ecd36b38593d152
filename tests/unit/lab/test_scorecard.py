"""The scorecard's numbers on responses small enough to work out by hand."""

import json
from itertools import product

import pytest
import torch

from valor.lab.scorecard import Branches, Judged, scorecard
from valor.lab.walk import make_walk


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
        after=torch.ones(7, 2),
    )
    found = scorecard(judged(), branches)["monte_carlo"]
    assert found["points"] == 7 and found["responses"] == 3 and found["branches"] == 2
    # Response 0: V rises with the truth; response 2: it rises (0.5, 0.9) while the truth falls; response 3 is flat.
    assert found["agreement"]["responses"] == 2 and found["agreement"]["mean"] == 0.5
    assert found["agreement"]["p"] == 1.0
    assert found["abs_error"] == pytest.approx((0 + 0.4 + 0.1 + 0.5 + 0.9 + 0.5 + 0.6) / 7, abs=1e-6)
    assert found["scatter"]["truth"] == [0.5, 1, 1, 1, 0, 1, 1]


def test_advantages_by_lambda_against_all_walks():
    """Walks of four doors taken at random, and a critic with an error of its own in each state: branches from sampled
    walks give the slope and the correlation that all 256 walks have, at every λ, with γ = 1."""
    walk, generator = make_walk(0, length=4, rooms=4), torch.Generator().manual_seed(0)
    exact = torch.tensor(walk.to_go(uniform=True)[::-1]) / walk.length  # [doors taken, room]
    errors = 0.05 * torch.randn(exact.shape, generator=generator, dtype=exact.dtype)
    all_walks = []
    for start, doors in product(range(4), product(range(2), repeat=4)):
        rooms, gains = [start], []
        for door in doors:
            gains.append(walk.gains[rooms[-1]][door] / walk.length)
            rooms.append(walk.leads[rooms[-1]][door])
        all_walks.append((torch.tensor(rooms), torch.tensor(gains)))
    rooms, gains = (torch.stack(part) for part in zip(*all_walks, strict=True))  # [64, 5], [64, 4]
    steps = torch.arange(4)
    gained = torch.cat([torch.zeros(64, 1), gains.cumsum(1)], 1)  # the outcome comes at the end: V counts what is won
    states = exact[torch.arange(5), rooms] + gained
    values = (exact + errors)[steps, rooms[:, :4]] + gained[:, :4]
    truth, outcome = states[:, 1:] - states[:, :4], gained[:, -1]
    rewards = torch.zeros(64, 4)
    rewards[:, -1] = outcome
    following = torch.cat([values[:, 1:], torch.zeros(64, 1)], 1)
    td = rewards + following - values

    drawn = torch.randint(64, (3000,), generator=generator)
    rows, tokens = torch.arange(3000).repeat_interleave(4), steps.repeat(3000)

    def branches(taken: torch.Tensor) -> torch.Tensor:
        """Outcomes of four walks that begin as these do, up to so many doors."""
        at, won = rooms[drawn[rows], taken][:, None].repeat(1, 4), gained[drawn[rows], taken][:, None].repeat(1, 4)
        for step in range(4):
            door = torch.randint(2, at.shape, generator=generator)
            goes_on = (taken <= step)[:, None]
            won = won + goes_on * torch.tensor(walk.gains)[at, door] / walk.length
            at = torch.where(goes_on, torch.tensor(walk.leads)[at, door], at)
        return won

    sample = Judged(
        values[drawn], outcome[drawn, None].repeat(1, 4), torch.ones(3000, 4), torch.ones(3000).bool(), [0] * 3000
    )
    found = scorecard(sample, Branches(rows, tokens, branches(tokens), branches(tokens + 1)))["monte_carlo"]["lambdas"]
    for by in found:
        advantages = torch.stack([(td[:, t:] * by["lam"] ** torch.arange(4 - t)).sum(1) for t in range(4)], 1)
        covariance = torch.cov(torch.stack([advantages.flatten(), truth.flatten()]))
        slope = covariance[0, 1] / covariance[1, 1]
        correlation = covariance[0, 1] / (covariance[0, 0] * covariance[1, 1]).sqrt()
        assert by["slope"] == pytest.approx(float(slope), abs=0.05)
        assert by["correlation"] == pytest.approx(float(correlation), abs=0.04)
    best = max(found, key=lambda by: by["correlation"])
    assert found[0]["lam"] < best["lam"] < 1.0  # what an error costs and what noise costs, weighed


def test_no_correlation_of_few_branches_is_beyond_one_and_the_order_of_lambdas_stays():
    """Two branches a state say little about how the true advantages vary: less than what the estimates share with them
    would need."""
    generator, beyond = torch.Generator().manual_seed(0), 0
    for _ in range(40):
        values, returns = (torch.rand(3, 4, generator=generator) for _ in range(2))
        rows, tokens = torch.arange(3).repeat_interleave(2), torch.tensor([0, 2]).repeat(3)
        before, after = (torch.rand(6, 2, generator=generator).round() for _ in range(2))
        judged = Judged(values, returns[:, -1:].repeat(1, 4), torch.ones(3, 4), torch.ones(3).bool(), [0, 1, 2])
        found = scorecard(judged, Branches(rows, tokens, before, after))["monte_carlo"]["lambdas"]
        correlations = [by["correlation"] for by in found if by["correlation"] is not None]
        assert all(-1.0 <= r <= 1.0 for r in correlations)
        beyond += any(abs(r) > 0.9999 for r in correlations) and len({*correlations}) == len(correlations)
    assert beyond > 3
