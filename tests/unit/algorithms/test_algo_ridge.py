"""Ridge regression from sums against least squares on the samples themselves, and what a prediction may know."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from valor.algorithms.ridge import RIDGES, Evidence, OnlineRidge, moments, ridge_regression


def samples(seed: int, count: int, features: int) -> tuple[np.ndarray, np.ndarray]:
    """Features of very different size and mean, and targets that depend on them with noise."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, features)) * 10.0 ** draw.integers(-2, 3, features) + draw.normal(size=features)
    return x, x @ draw.normal(size=features) + draw.normal(size=count)


def stacked(x: np.ndarray, y: np.ndarray, weights: np.ndarray, ridge: float) -> np.ndarray:
    """Intercept and coefficients by numpy.linalg.lstsq of weighted samples, and a row for each penalty."""
    total, root = weights.sum(), np.sqrt(weights)[:, None]
    mean = weights @ x / total
    std = np.sqrt(weights @ (x - mean) ** 2 / total)
    penalty = np.hstack([np.zeros((x.shape[1], 1)), np.diag(np.sqrt(total * ridge) * std)])
    rows = np.vstack([root * np.hstack([np.ones((len(x), 1)), x]), penalty])
    return np.linalg.lstsq(rows, np.concatenate([root[:, 0] * y, np.zeros(x.shape[1])]), rcond=None)[0]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(2, 40), st.integers(1, 8), st.sampled_from(RIDGES))
def test_ridge_is_least_squares_with_penalties(seed, count, features, ridge) -> None:
    x, y = samples(seed, count, features)
    (found,) = ridge_regression(moments(torch.tensor(x), torch.tensor(y)), [ridge]).numpy()
    expected = stacked(x, y, np.ones(count), ridge)
    at = samples(seed + 1, 10, features)[0]
    np.testing.assert_allclose(
        found[0] + at @ found[1:], expected[0] + at @ expected[1:], rtol=1e-5, atol=1e-5 * np.abs(y).max()
    )


def test_features_that_do_not_vary_have_no_weight() -> None:
    x, y = samples(0, 50, 3)
    x = np.hstack([x, np.full((50, 1), 0.3), np.zeros((50, 1))])
    found = ridge_regression(moments(torch.tensor(x), torch.tensor(y)))
    assert found.shape == (len(RIDGES), 6) and found.isfinite().all() and (found[:, 4:] == 0).all()
    without = ridge_regression(moments(torch.tensor(x[:, :3]), torch.tensor(y)))
    torch.testing.assert_close(found[:, :4], without, rtol=1e-9, atol=1e-9)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.sampled_from([1.0, 0.9, 0.5]))
def test_each_step_is_predicted_from_the_steps_before(seed, forgetting) -> None:
    """Against a second computation that keeps every sample: weights forgetting^age, the ridge of least remembered
    error, predictions within the range of what was seen and two standard deviations of what was fitted."""
    fit, seen, errors = OnlineRidge(forgetting), list[tuple[np.ndarray, np.ndarray]](), np.zeros(len(RIDGES))
    for step in range(5):
        x, y = samples(seed, 60, 4)
        x, y = x[step * 12 :][:12], y[step * 12 :][:12]
        found = fit.predict(torch.tensor(x)).numpy()
        if not seen:
            assert (found == 0).all()
        else:
            old_x, old_y = (np.concatenate(column) for column in zip(*seen, strict=True))
            weights = np.repeat(forgetting ** np.arange(len(seen))[::-1], 12)
            fits = [stacked(old_x, old_y, weights, ridge) for ridge in RIDGES]
            by_ridge = np.stack([w[0] + x @ w[1:] for w in fits], 1).clip(old_y.min(), old_y.max())
            mean, fitted = np.average(old_y, weights=weights), np.stack([w[0] + old_x @ w[1:] for w in fits], 1)
            reach = 2 * np.sqrt(np.average((fitted - mean) ** 2, weights=weights, axis=0))
            by_ridge = by_ridge.clip(mean - reach, mean + reach)
            best = int(errors.argmin()) if step > 1 else len(RIDGES) - 1
            assert fit.chosen == best
            np.testing.assert_allclose(found, by_ridge[:, best], rtol=1e-5, atol=1e-5 * np.abs(old_y).max())
            errors = 0.8 * errors + ((by_ridge - y[:, None]) ** 2).mean(0)
        metrics = fit.learn(fit.evidence(torch.tensor(x), torch.tensor(y)))
        assert metrics["vf_loss"] == pytest.approx(0.5 * ((found - y) ** 2).mean())
        seen.append((x, y))


def test_noise_of_targets_is_no_reason_to_believe_in_an_extrapolation() -> None:
    """Targets from -3 to 3 of which the features explain a tenth of a unit: a state far away is not worth 3."""
    draw = np.random.default_rng(0)
    x, noise = draw.normal(size=(2000, 1)), draw.normal(size=2000).clip(-3, 3)
    fit = OnlineRidge(0.9)
    for _ in range(2):  # the second evidence judges the ridges
        fit.learn(fit.evidence(torch.tensor(x), torch.tensor(0.1 * x[:, 0] + noise)))
    far = fit.predict(torch.tensor([[100.0], [-100.0]]))
    assert 0.15 < far[0] < 0.35 and -0.35 < far[1] < -0.15, far


def test_a_prediction_does_not_know_its_own_outcome() -> None:
    x, y = (torch.tensor(part) for part in samples(3, 40, 3))
    one, other = OnlineRidge(0.9), OnlineRidge(0.9)
    for fit in (one, other):
        fit.learn(fit.evidence(x[:20], y[:20]))
    before = one.predict(x[20:])
    one.evidence(x[20:], y[20:] + 100)
    assert torch.equal(one.predict(x[20:]), before)
    one.learn(one.evidence(x[20:], y[20:] + 100))
    assert not torch.equal(one.predict(x[20:]), before) and torch.equal(other.predict(x[20:]), before)


def test_evidence_of_parts_is_that_of_the_whole() -> None:
    x, y = (torch.tensor(part) for part in samples(5, 30, 4))
    fit = OnlineRidge(0.9)
    fit.learn(fit.evidence(x, y))
    parts = [fit.evidence(x[a:b], y[a:b]) for a, b in ((0, 7), (7, 7), (7, 30))]
    whole, total = fit.evidence(x, y), Evidence.total(parts)
    torch.testing.assert_close(total.moments, whole.moments)
    torch.testing.assert_close(total.errors, whole.errors)
    assert torch.equal(total.low, whole.low) and torch.equal(total.high, whole.high)
    assert math.isinf(parts[1].low) and not parts[1].moments.any()


def test_nothing_is_learnt_from_nothing_or_from_what_is_not_finite() -> None:
    x, y = (torch.tensor(part) for part in samples(6, 20, 3))
    fit = OnlineRidge(0.9)
    assert fit.learn(fit.evidence(x[:0], y[:0]))["skipped"] == 0 and not fit.state
    fit.learn(fit.evidence(x, y))
    before = {name: part.clone() for name, part in fit.state.items()}
    assert fit.learn(fit.evidence(x, torch.full_like(y, torch.nan)))["skipped"] == 1
    fit.learn(fit.evidence(x[:0], y[:0]))
    assert all(torch.equal(before[name], part) for name, part in fit.state.items())
