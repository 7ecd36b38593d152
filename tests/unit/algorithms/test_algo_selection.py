"""Dynamic sampling."""

import torch

from valor import algorithms


def test_groups_whose_samples_agree_are_filtered_out() -> None:
    metric = torch.tensor([1.0, 1.0, 0.1, 0.1, 0.1, 0.0, 1.0, 5.0])
    ids = ["a", "a", "b", "b", "b", "c", "c", "d"]
    assert algorithms.filter_groups(metric, ids).tolist() == [False] * 5 + [True, True, True]


def test_a_sample_without_a_part_or_rounding_makes_no_group_differ():
    """As in advantages, where both come out 0: a failed episode is no wrong answer."""
    ids, part = ["a"] * 3 + ["b"] * 3 + ["c"] * 2, torch.tensor([1, 1, 0, 1, 0, 1, 0, 0])
    metric = torch.tensor([1.0, 1.0, 0.0, 1.0, 5.0, 0.0, 0.0, 1.0])
    assert algorithms.filter_groups(metric, ids, part).tolist() == [False] * 3 + [True] * 3 + [False] * 2
    near = torch.tensor([0.3, 0.0, 1000.0, 1000.01])
    near[1] = near[0].nextafter(near[2])
    assert algorithms.filter_groups(near, ["a", "a", "b", "b"]).tolist() == [False, False, True, True]
