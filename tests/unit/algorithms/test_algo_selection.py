"""Dynamic sampling."""

import torch

from valor import algorithms


def test_groups_whose_samples_agree_are_filtered_out() -> None:
    metric = torch.tensor([1.0, 1.0, 0.1, 0.1, 0.1, 0.0, 1.0, 5.0])
    ids = ["a", "a", "b", "b", "b", "c", "c", "d"]
    assert algorithms.filter_groups(metric, ids).tolist() == [False] * 5 + [True, True, True]
