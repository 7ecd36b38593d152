"""λ by the estimated errors of advantages: by plain loops, and against the exact values of walks."""

import math
from itertools import product

import pytest
import torch

from valor.algorithms import advantage_errors, auto_lambda, compute_advantages, least_error_lambda
from valor.algorithms.auto_lambda import LAMBDAS
from valor.algorithms.ridge import OnlineRidge
from valor.lab.walk import make_walk
from valor.rewards.walk import Walk

GAMMA = 0.9


def test_errors_are_those_of_plain_loops():
    """Also with tokens of tools in between, and with rows of different lengths."""
    draw = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1.0, 1, 0, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    rewards, values, error = (torch.randn(3, 5, generator=draw, dtype=torch.float64) * mask for _ in range(3))
    bias, variance = advantage_errors(rewards, values, error, mask, GAMMA)
    for number, lam in enumerate(LAMBDAS):
        moved = values + error
        before, after = (
            compute_advantages(
                "gae", rewards=rewards, response_mask=mask, values=v, gamma=GAMMA, lam=lam, whitening="none"
            )[0]
            for v in (values, moved)
        )
        shift = (after - before + error) * mask  # without the error of the token's own state
        assert bias[number] == pytest.approx(float(shift.square().sum() / mask.sum()))
        td = compute_advantages(
            "gae", rewards=rewards, response_mask=mask, values=values, gamma=GAMMA, lam=0.0, whitening="none"
        )[0]
        assert variance[number] == pytest.approx(float((before - td).square().sum() / mask.sum()))
    lam, of_bias, of_variance = least_error_lambda(rewards, values, error, mask, GAMMA)
    assert lam == LAMBDAS[int((bias + variance / 2).argmin())] and (of_bias, of_variance) == (
        pytest.approx(float(bias[LAMBDAS.index(lam)])),
        pytest.approx(float(variance[LAMBDAS.index(lam)])),
    )
    assert least_error_lambda(rewards, values, torch.zeros(3, 5), mask, GAMMA)[0] == 1.0
    assert least_error_lambda(rewards, values, error, torch.zeros(3, 5), GAMMA) == (1.0, 0.0, 0.0)  # no token


def test_some_of_many_responses_stand_for_all(monkeypatch):
    """And the noise averages out over all of them."""
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, 30, generator=draw, dtype=torch.float64).repeat(50, 1) for _ in range(3)]
    mask = torch.ones(100, 30)
    mask[60] = 0
    of_all = least_error_lambda(*inputs, mask, 1.0)
    monkeypatch.setattr(auto_lambda, "_TOKENS", 30 * 20)
    assert least_error_lambda(*inputs, mask, 1.0) == pytest.approx(of_all, rel=0.05)
    few = least_error_lambda(*(x[:4] for x in (*inputs, mask)), 1.0)
    assert 0.2 < few[0] < of_all[0] < 1.0


def all_walks(walk: Walk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of doors taken at random: features [64, 4, 17] of all states, their exact values [64, 4], outcomes [64]."""
    exact = torch.tensor(walk.to_go(uniform=True)[::-1]) / walk.length  # [doors taken, room]
    rooms, gains = [], []
    for start, doors in product(range(4), product(range(2), repeat=4)):
        at, won = [start], [0.0]
        for door in doors:
            won.append(won[-1] + walk.gains[at[-1]][door] / walk.length)
            at.append(walk.leads[at[-1]][door])
        rooms.append(at)
        gains.append(won)
    at, won = torch.tensor(rooms)[:, :4], torch.tensor(gains)
    place = torch.nn.functional.one_hot(4 * torch.arange(4) + at, 16)
    values = exact[torch.arange(4), at] + won[:, :4]
    return torch.cat([place, won[:, :4, None]], -1), values, won[:, 4]


@pytest.mark.parametrize(("steps", "of_half"), [(4, 0.7), (20, 2.0)])
def test_bias_and_variance_against_exact_values(steps, of_half):
    """A regression of noisy outcomes: the difference of its halves, which is as large as the error of one of them, is
    twice the squared error that exact values tell of the whole, and less where a ridge leaves out something. The
    variance is that by exact values, and so is nearly the λ."""
    features, exact, outcomes = all_walks(make_walk(0, length=4, rooms=4))
    estimated, true, mask = [], [], torch.ones(64, 4)
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        whole, *halves = fits = [OnlineRidge(1.0) for _ in range(3)]
        for _ in range(steps):
            rows = torch.randint(64, (64,), generator=draw)
            targets = (outcomes[rows] + 0.5 * torch.randn(64, generator=draw))[:, None].expand(-1, 4)
            for fit, part in zip(fits, (slice(None), slice(0, None, 2), slice(1, None, 2)), strict=True):
                x, y = features[rows[part]].flatten(0, 1).double(), targets[part].flatten()
                fit.learn(fit.evidence(x, y))
        rows = torch.randint(64, (64,), generator=draw)
        rewards = torch.zeros(64, 4).double()
        rewards[:, -1] = outcomes[rows] + 0.5 * torch.randn(64, generator=draw)
        values, (first, second) = whole.predict(features[rows]), (fit.predict(features[rows]) for fit in halves)
        halves_differ, truth = (first - second) / math.sqrt(2), exact[rows].double()
        estimated.append(torch.stack(advantage_errors(rewards, values, halves_differ, mask, 1.0)))
        true.append(torch.stack(advantage_errors(rewards, truth, values - truth, mask, 1.0)))
    (bias, variance), (true_bias, true_variance) = torch.stack(estimated).mean(0), torch.stack(true).mean(0)
    assert ((bias / true_bias)[:-1] / of_half - 1).abs().max() < 0.2, bias / true_bias
    assert ((variance / true_variance)[1:] - 1).abs().max() < 0.1, variance / true_variance
    by = [LAMBDAS[int((b + v / 64).argmin())] for b, v in ((bias, variance), (true_bias, true_variance))]
    assert 0.2 < by[1] < 0.9 and by[0] == pytest.approx(by[1], abs=0.2), by
