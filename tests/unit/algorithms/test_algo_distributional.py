"""Values as distributions: by hand, against NumPy, and against what is known of quantiles."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from valor import algorithms
from valor.algorithms.value_losses import quantile_huber, quantile_levels
from valor.algorithms.value_quality import coverage, crps
from valor.errors import UserError


def plain_loss(theta, targets, kappa):
    """The definition, pair by pair."""
    total = 0.0
    for i, t in enumerate(theta):
        for r in targets:
            u = r - t
            size = (
                abs(u) if kappa == 0 else (0.5 * u * u if abs(u) <= kappa else kappa * (abs(u) - 0.5 * kappa)) / kappa
            )
            total += abs((i + 0.5) / len(theta) - (u < 0)) * size
    return total / len(theta) / len(targets)


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5), st.sampled_from([0.0, 0.05, 1.0]))
@settings(max_examples=100, deadline=None)
def test_the_loss_against_its_definition(seed, k, j, kappa):
    rng = np.random.default_rng(seed)
    theta, targets = rng.normal(size=(2, 3, k)), rng.normal(size=(2, 3, j))
    loss, _, mean = quantile_huber(torch.tensor(theta), torch.tensor(targets), huber_kappa=kappa)
    expected = [[plain_loss(theta[b, t], targets[b, t], kappa) for t in range(3)] for b in range(2)]
    np.testing.assert_allclose(loss.numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(mean.numpy(), theta.mean(-1), atol=1e-6)


def test_a_loss_by_hand():
    # levels 1/4 and 3/4; u = 1 and -1: 1/4 * 1 and 1/4 * 1, by two
    loss, _, _ = quantile_huber(torch.tensor([[[0.0, 2.0]]]), torch.tensor([[1.0]]), huber_kappa=0.0)
    assert loss.item() == pytest.approx(0.25)


def test_its_minimum_is_the_quantiles_of_what_it_sees():
    returns = torch.linspace(0, 1, 1001).reshape(1, 1, -1)
    theta = torch.zeros(1, 1, 4, requires_grad=True)
    optimizer = torch.optim.Adam([theta], lr=0.02)
    for _ in range(400):
        optimizer.zero_grad()
        quantile_huber(theta, returns, huber_kappa=0.0)[0].sum().backward()
        optimizer.step()
    torch.testing.assert_close(theta.detach().flatten().double(), quantile_levels(4), atol=0.02, rtol=0)


def plain_tail_mean(atoms, weights, low, high):
    """Numerically: the mean of the quantile function on a fine grid of levels."""
    order = np.argsort(atoms)
    levels = low + (high - low) * (np.arange(200_000) + 0.5) / 200_000
    found = np.searchsorted(np.cumsum(weights[order]), levels)
    return atoms[order][np.minimum(found, len(atoms) - 1)].mean()


@given(st.integers(0, 10**6), st.integers(1, 8), st.floats(0, 0.45), st.floats(0.55, 1))
@settings(max_examples=30, deadline=None)
def test_means_between_levels_against_an_integral(seed, k, low, high):
    rng = np.random.default_rng(seed)
    atoms, weights = rng.normal(size=k), rng.random(k) + 0.01
    weights /= weights.sum()
    found = algorithms.tail_mean(torch.tensor(atoms), torch.tensor(weights), low, high)
    assert float(found) == pytest.approx(plain_tail_mean(atoms, weights, low, high), abs=1e-3)


def test_mean_cvar_and_trimmed_mean_by_hand():
    atoms, weights = torch.tensor([4.0, 1.0, 2.0, 3.0]), torch.full((4,), 0.25)
    assert [algorithms.tail_mean(atoms, weights, *levels).item() for levels in ((0, 1), (0, 0.5), (0.25, 0.75))] == [
        2.5,
        1.5,
        2.5,
    ]
    assert algorithms.tail_mean(atoms, weights, 0.0, 0.375).item() == pytest.approx((0.25 * 1 + 0.125 * 2) / 0.375)


@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0.5, 1))
@settings(max_examples=50, deadline=None)
def test_distributional_gae_against_a_loop_and_its_mean_against_gae(seed, lam, gamma):
    generator = torch.Generator().manual_seed(seed)
    quantiles = torch.randn(3, 6, 4, dtype=torch.float64, generator=generator).sort(-1).values
    rewards = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    mask = (torch.rand(3, 6, generator=generator) < 0.8).double()
    mask[:, 0] = 1
    inputs = {"rewards": rewards, "response_mask": mask, "gamma": gamma, "lam": lam, "whitening": "none"}
    found = algorithms.quantile_targets("gae", quantiles=quantiles, **inputs)
    _, returns = algorithms.compute_advantages("gae", values=quantiles.mean(-1), **inputs)
    torch.testing.assert_close(found.mean(-1), returns, atol=1e-9, rtol=0)
    for b in range(3):
        own = mask[b].nonzero().flatten().tolist()
        earned = [float(rewards[b, i:j].sum()) for i, j in zip(own, [*own[1:], 6], strict=True)]
        for i in range(4):
            advantage = after = 0.0
            for t, r in zip(reversed(own), reversed(earned), strict=True):
                value = float(quantiles[b, t, i])
                advantage = r + gamma * after - value + gamma * lam * advantage
                after = value
                assert float(found[b, t, i]) == pytest.approx(advantage + value, abs=1e-6)


def test_quantiles_of_bins():
    atoms, weights = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([[0.5, 0.0, 0.5], [1.0, 0.0, 0.0]])
    assert algorithms.quantiles_of(atoms, weights).tolist() == [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]


def test_crps_and_coverage_by_hand():
    point, spread = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.0, 1.0]])
    outcome = torch.tensor([1.0])
    assert crps(point, outcome).item() == 0.5
    assert crps(spread, outcome).item() == 0.25  # ½ − ½ · ½
    (found,) = coverage(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.tensor([0.0, 1.0]), torch.tensor([0.5]))
    assert found == {"at": 0.5, "predicted": 0.25, "observed": 0.5}


def test_what_cannot_be_is_one_line():
    with pytest.raises(UserError, match="quantile of 3 quantiles got 2"):
        quantile_huber(torch.zeros(1, 1, 2), torch.zeros(1, 1), num_quantiles=3)
    with pytest.raises(UserError, match="huber_kappa must be 0 or more"):
        quantile_huber(torch.zeros(1, 1, 2), torch.zeros(1, 1), huber_kappa=-1.0)
