"""Dynamic sampling and reward-weighted resampling."""

import pytest
import torch

from valor import algorithms
from valor.errors import UserError


def test_groups_whose_samples_agree_are_filtered_out() -> None:
    metric = torch.tensor([1.0, 1.0, 0.1, 0.1, 0.1, 0.0, 1.0, 5.0])
    ids = ["a", "a", "b", "b", "b", "c", "c", "d"]
    assert algorithms.filter_groups(metric, ids).tolist() == [False] * 5 + [True, True, True]


def test_weights() -> None:
    scores = torch.tensor([-2.0, 0.0, 1.0, 1.0])
    torch.testing.assert_close(algorithms.pf_ppo_weights(scores), torch.tensor([4.0, 1e-8, 1.0, 1.0]))
    cubed = algorithms.pf_ppo_weights(scores, weight_pow=3.0)
    torch.testing.assert_close(cubed, torch.tensor([8.0, 1e-8, 1.0, 1.0]))
    ends = algorithms.pf_ppo_weights(scores, reweight_method="max_min")
    torch.testing.assert_close(ends, torch.tensor([1.0, 1e-8, 1.0, 1.0]))
    best = algorithms.pf_ppo_weights(scores, reweight_method="max_random")
    torch.testing.assert_close(best, torch.tensor([0.1, 0.1, 0.4, 0.4]))


def test_resampling_follows_weights_and_generator() -> None:
    scores = torch.tensor([0.0, 1.0, 2.0] * 1000)
    drawn = [algorithms.pf_ppo_resample(scores, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    share = torch.bincount(drawn[0] % 3, minlength=3) / 3000
    assert share.tolist() == pytest.approx([0.0, 0.2, 0.8], abs=0.03)


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="did you mean max_min"):
        algorithms.pf_ppo_weights(torch.ones(2), reweight_method="maxmin")
    with pytest.raises(UserError, match="at least one sample"):
        algorithms.pf_ppo_resample(torch.ones(0))
