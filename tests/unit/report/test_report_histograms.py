"""Spreads over steps, from histograms of different ranges: quantiles by hand."""

from valor.report.pictures import spreads
from valor.tracking.metrics import Histogram


def test_a_band_of_four_fifths_around_the_median() -> None:
    """Step 1: half of the entries in [0, 1], half in [1, 2]; step 2: all in [1, 2], 3 of 10 in its lower half."""
    recorded = [(1, Histogram(0.0, 2.0, [50, 50])), (2, Histogram(1.0, 2.0, [30, 70]))]
    [[band, median]] = [figure["traces"] for figure in spreads({"critic/advantages/histogram": recorded})]
    assert band["x"] == [1, 2, 2, 1] and band["y"] == [1.8, 1.929, 1.167, 0.2]
    assert median["y"] == [1.0, 1.643]


def test_entries_that_are_all_equal_are_shown_as_they_are() -> None:
    [shown] = spreads({"critic/advantages/histogram": [(1, Histogram(0.0, 0.0, [9])), (2, Histogram(0.5, 0.5, [9]))]})
    band, median = shown["traces"]
    assert median["y"] == [0.0, 0.5] and band["y"] == [0.0, 0.5, 0.5, 0.0]
    assert shown["layout"]["xaxis"]["dtick"] == 1


def test_returns_are_shown_beside_values_only() -> None:
    recorded = [(1, Histogram(0.0, 1.0, [1, 2]))]
    assert [*spreads({"critic/returns/histogram": recorded})] == []
    both = {"critic/returns/histogram": recorded, "critic/values/histogram": recorded}
    assert [one["id"] for one in spreads(both)] == ["values-spread", "returns-spread"]
