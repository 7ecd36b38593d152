"""Intervals and tests over seeds: numbers by hand."""

import numpy as np
import pytest

from valor.lab.statistics import bootstrap_interval, detectable_effect, holm, paired_t_p, sign_flip_p


def test_bootstrap_interval_of_three_values_is_their_range():
    # 27 resamples; the smallest mean has probability 1/27 = 3.7 %, more than the 2.5 % that are cut off
    assert bootstrap_interval([0.6, 0.1, 0.5]) == pytest.approx((0.1, 0.6))


def test_bootstrap_interval_agrees_with_scipy():
    # scipy.stats.bootstrap((x,), numpy.mean, n_resamples=200000, method="percentile"): (0.592, 0.796), (3.8, 7.7)
    assert bootstrap_interval([0.61, 0.7, 0.64, 0.9, 0.55]) == pytest.approx((0.592, 0.796), abs=1e-12)
    assert bootstrap_interval([1, 2, 3, 4, 5, 6, 7, 8, 9, 12]) == pytest.approx((3.8, 7.7), abs=0.05)


def test_one_value_has_no_interval():
    assert bootstrap_interval([0.5]) is None
    assert bootstrap_interval([]) is None


def test_bootstrap_interval_covers_the_mean_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(size=(400, 12))
    found = [bootstrap_interval(row) for row in draws]
    covered = np.mean([low <= 0 <= high for low, high in found])
    assert 0.85 < covered < 0.97  # 12 values: a little below the nominal 0.95


def test_sign_flips_by_hand():
    # sums over the eight sign patterns of (1, 2, 4): ±7, ±5, ±3, ±1; two of them are as far out as 7
    assert sign_flip_p([1, 2, 4]) == 2 / 8
    assert sign_flip_p([1, 2, -4]) == 8 / 8  # |1 + 2 - 4| = 1: none is nearer
    assert sign_flip_p([0.12, 0.03, -0.05, 0.2, 0.11]) == 0.1875  # scipy.stats.permutation_test, all permutations
    assert sign_flip_p([0.0, 0.0]) == sign_flip_p([0.3]) == 1.0
    assert 0.0 < sign_flip_p([1.0] * 20) < 1e-4  # drawn, and yet never 0


def test_paired_t():
    assert paired_t_p([0.12, 0.03, -0.05, 0.2, 0.11]) == pytest.approx(0.12649956659172252)  # scipy.stats.ttest_1samp
    assert paired_t_p([0.3]) is None
    assert paired_t_p([0.3, 0.3, 0.3]) is None


def test_holm_by_hand():
    # sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1, and never less than the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_detectable_effect_by_hand_and_by_simulation():
    """Four differences with s = 1: (t_0.975 + t_0.8) / 2 of 3 degrees of freedom = (3.1824 + 0.9785) / 2. Of 20
    pairs, a paired t-test finds an effect of that size about four times in five."""
    four = np.array([-1.0, 1.0, -1.0, 1.0]) * np.sqrt(3) / 2
    assert detectable_effect(list(four)) == pytest.approx((3.1824 + 0.9785) / 2, abs=1e-3)
    assert detectable_effect([0.3]) is None
    rng = np.random.default_rng(0)
    unit = rng.normal(size=20)
    effect = detectable_effect(list((unit - unit.mean()) / unit.std(ddof=1)))
    assert effect is not None
    found = [paired_t_p(list(rng.normal(effect, 1.0, 20))) < 0.05 for _ in range(1000)]
    assert 0.75 < np.mean(found) < 0.86
