"""How good values are: hand-worked numbers, ties among them, and a closed form."""

import math

import pytest
import torch

from valor.algorithms.value_quality import (
    auc,
    calibration,
    calibration_error,
    noise_ceiling,
    pair_agreement,
    pearson,
)


def t(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)


def test_auc_counts_pairs_and_half_of_the_equal_ones():
    # right: 1, 2; wrong: 1, 0. Pairs (1,1) ½, (1,0) 1, (2,1) 1, (2,0) 1.
    assert auc(t(1, 1, 0, 2), t(1, 0, 0, 1)) == 3.5 / 4
    assert auc(t(3, 3, 3, 3), t(1, 0, 0, 1)) == 0.5
    assert auc(t(0.1, 0.2, 0.9), t(0, 0, 1)) == 1.0
    assert auc(t(0.9, 0.2, 0.1), t(0, 0, 1)) == 0.0
    assert math.isnan(auc(t(0.1, 0.2), t(1, 1)))


def test_auc_is_the_share_of_ordered_pairs():
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 6, (200,), generator=generator).float()  # many ties
    right = torch.rand(200, generator=generator) < 0.3
    gap = values[right][:, None] - values[~right]
    assert auc(values, right) == pytest.approx(float((gap > 0).double().mean() + 0.5 * (gap == 0).double().mean()))


def test_calibration_bins_hold_equal_numbers_and_never_part_equal_values():
    bins = calibration(t(0.4, 0.1, 0.3, 0.2), t(1, 0, 1, 0), bins=2)
    assert [(b["count"], round(b["value"], 6), b["outcome"]) for b in bins] == [(2, 0.15, 0.0), (2, 0.35, 1.0)]
    assert calibration_error(bins) == pytest.approx(0.5 * 0.15 + 0.5 * 0.65)
    tied = calibration(t(0, 0, 0, 0, 0, 1), t(1, 0, 0, 0, 0, 1), bins=3)
    assert tied == [
        {"count": 5, "value": 0.0, "outcome": pytest.approx(0.2)},
        {"count": 1, "value": 1.0, "outcome": 1.0},
    ]


def test_an_honest_critic_has_no_calibration_error():
    assert calibration_error(calibration(t(0.25, 0.25, 0.25, 0.25), t(0, 0, 1, 0))) == 0.0


def test_pearson():
    assert pearson(t(1, 2, 3), t(2, 4, 6)) == pytest.approx(1.0)
    assert pearson(t(1, 2, 3), t(1, 0, 2)) == pytest.approx(0.5)
    assert math.isnan(pearson(t(1, 1, 1), t(1, 0, 2)))


def test_pair_agreement_looks_at_the_pairs_that_differ_in_truth():
    # Truth orders (a,b), (a,c); b and c are alike. V has a < b (agrees) and a = c (half).
    assert pair_agreement(t(1, 2, 1), t(0, 1, 1)) == 0.75
    assert pair_agreement(t(3, 2, 1), t(0, 1, 2)) == 0.0
    assert pair_agreement(t(7, 7, 7), t(0, 1, 2)) == 0.5
    assert math.isnan(pair_agreement(t(1, 2, 3), t(1, 1, 1)))


def test_noise_ceiling_is_what_the_truth_itself_reaches():
    generator = torch.Generator().manual_seed(1)
    truth = torch.rand(20_000, generator=generator)
    draws = (torch.rand(20_000, 8, generator=generator) < truth[:, None]).float()
    assert noise_ceiling(draws) == pytest.approx(pearson(truth, draws.mean(1)), abs=0.01)
    # By hand: means 0.5 and 0.5 + 1; var of the means 0.5, noise 0.5 / 2: √(1 − 0.25 / 0.5).
    assert noise_ceiling(torch.tensor([[0.0, 1.0], [1.0, 2.0]])) == pytest.approx(math.sqrt(0.5))
    assert math.isnan(noise_ceiling(torch.tensor([[0.0], [1.0]])))
    assert noise_ceiling(torch.tensor([[0.0, 1.0], [1.0, 0.2]])) == 0.0
