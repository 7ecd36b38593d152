"""Histograms of different ranges as columns over common bins: shares by hand."""

import numpy as np
import pytest

from valor.report.pictures import spreads
from valor.tracking.metrics import Histogram


def test_each_column_holds_the_steps_shares() -> None:
    """Step 1: half of the entries in [0, 1], half in [1, 2]; step 2: all in [1, 2]."""
    recorded = [(1, Histogram(0.0, 2.0, [50, 50])), (2, Histogram(1.0, 2.0, [30, 70]))]
    [[heat]] = [one["traces"] for one in spreads({"critic/advantages/histogram": recorded})]
    shares, rows = np.array(heat["z"]), np.array(heat["y"])
    assert heat["x"] == [1, 2] and shares.shape == (40, 2)
    np.testing.assert_allclose(shares.sum(0), 1.0, atol=2e-3)
    assert shares[rows < 1.0, 1].sum() == pytest.approx(0.0, abs=0.04)
    assert shares[rows < 1.0, 0].sum() == pytest.approx(0.5, abs=0.04)


def test_returns_are_shown_beside_values_only() -> None:
    recorded = [(1, Histogram(0.0, 1.0, [1, 2]))]
    assert [*spreads({"critic/returns/histogram": recorded})] == []
    both = {"critic/returns/histogram": recorded, "critic/values/histogram": recorded}
    assert [one["id"] for one in spreads(both)] == ["values-spread", "returns-spread"]


def test_one_value_alone_has_a_range_around_it() -> None:
    recorded = {"critic/advantages/histogram": [(3, Histogram(-0.5, 0.5, [0, 7]))]}
    [[heat]] = [one["traces"] for one in spreads(recorded)]
    assert heat["y"][0] < 0.25 < heat["y"][-1]
