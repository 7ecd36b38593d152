"""What a few seeds can say: bootstrap intervals, paired tests, and the correction for several comparisons.

Resamples and sign flips are enumerated while possible (scipy's bootstrap always draws), else drawn from a fixed seed.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
from scipy import stats

_ENUMERATED = 50_000  # resamples or sign patterns listed one by one: up to 6 values, up to 15 pairs
_DRAWN = 20_000
_MOST_NUMBERS = 10_000_000  # of all resamples that are in memory at once


def bootstrap_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the mean (Efron 1979); None for fewer than two values."""
    x = np.asarray(values, float)
    n = len(x)
    if n < 2:
        return None
    if n**n <= _ENUMERATED:
        means = x[np.array(list(product(range(n), repeat=n)))].mean(1)
    else:
        random, at_once = np.random.default_rng(0), max(1, _MOST_NUMBERS // n)
        sizes = [min(at_once, _DRAWN - done) for done in range(0, _DRAWN, at_once)]
        means = np.concatenate([x[random.integers(n, size=(size, n))].mean(1) for size in sizes])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return float(low), float(high)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided exact permutation test of paired differences: the share of sign patterns at least as extreme.

    It assumes only that without an effect each difference is as likely to have the other sign (Fisher 1935).
    """
    if len(differences) < 2:
        return 1.0
    options = {"permutation_type": "samples", "n_resamples": _ENUMERATED, "batch": 1000}
    return float(stats.permutation_test((differences,), np.sum, **options, rng=np.random.default_rng(0)).pvalue)


def paired_t_p(differences: Sequence[float]) -> float | None:
    """Two-sided p of Student's paired t-test; None where it does not exist (one pair, or all differences alike)."""
    x = np.asarray(differences, float)
    if len(x) < 2 or np.ptp(x) <= 1e-12 * np.abs(x).max():
        return None
    return float(stats.ttest_1samp(x, 0.0).pvalue)  # type: ignore[attr-defined]  # scipy has no types


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) step-down correction: values to compare with the level, in the order given."""
    p = np.array(p_values, float)
    order = p.argsort(kind="stable")
    steps = np.arange(len(p), 0, -1) * p[order]
    p[order] = np.maximum.accumulate(steps.clip(max=1.0))
    return p.tolist()


def detectable_effect(differences: Sequence[float]) -> float | None:
    """The true mean difference that a paired t-test of so many pairs, with their spread, finds in four of five tries at
    5 % two-sided: (t_0.975 + t_0.8) s / √n, of n − 1 degrees of freedom; None for one pair.

    An effect below it may well be there when a table shows none (Bloom 1995, minimum detectable effects).
    """
    n = len(differences)
    if n < 2:
        return None
    quantiles = stats.t.ppf([0.975, 0.8], n - 1)  # type: ignore[attr-defined]  # scipy has no types
    return float(quantiles.sum() * np.std(differences, ddof=1) / np.sqrt(n))
