"""Histograms of different ranges as columns over common bins: shares by hand."""

import numpy as np
import pytest

from valor.report.pictures import histogram_specs
from valor.tracking.metrics import Histogram


def test_each_column_holds_the_steps_shares() -> None:
    """Step 1: half of the entries in [0, 1], half in [1, 2]; step 2: all in [1, 2]."""
    spreads = [(1, Histogram(0.0, 2.0, [50, 50])), (2, Histogram(1.0, 2.0, [30, 70]))]
    [spec] = histogram_specs({"critic/advantages/histogram": spreads})
    shares, rows = np.array(spec["shares"]), np.array(spec["rows"])
    assert spec["steps"] == [1, 2] and shares.shape == (40, 2)
    np.testing.assert_allclose(shares.sum(0), 1.0, atol=2e-3)
    assert shares[rows < 1.0, 1].sum() == pytest.approx(0.0, abs=0.04)
    assert shares[rows < 1.0, 0].sum() == pytest.approx(0.5, abs=0.04)


def test_returns_are_shown_beside_values_only() -> None:
    spreads = [(1, Histogram(0.0, 1.0, [1, 2]))]
    assert histogram_specs({"critic/returns/histogram": spreads}) == []
    both = {"critic/returns/histogram": spreads, "critic/values/histogram": spreads}
    assert [one["id"] for one in histogram_specs(both)] == ["values-spread", "returns-spread"]


def test_one_value_alone_has_a_range_around_it() -> None:
    [spec] = histogram_specs({"critic/advantages/histogram": [(3, Histogram(-0.5, 0.5, [0, 7]))]})
    assert spec["rows"][0] < 0.25 < spec["rows"][-1]
