"""Which samples are trained on: dynamic sampling (DAPO)."""

import torch
from torch import Tensor

from valor.algorithms.groups import ROUNDING, GroupIds, Groups


def filter_groups(metric: Tensor, group_ids: GroupIds, takes_part: Tensor | None = None) -> Tensor:
    """[B] bool: samples of groups whose metric [B] is not the same for all, as only these carry a group-relative signal
    (DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476). A group of one, which cannot differ, is kept.

    As in advantages, the rounding of float32 is no difference, nor is a sample that takes no part (`takes_part` [B] 0).
    """
    groups = Groups(group_ids, metric.shape[0], metric.device)
    left_out = torch.zeros_like(metric, dtype=torch.bool) if takes_part is None else takes_part == 0
    highest = groups.extreme(metric.masked_fill(left_out, -torch.inf), "amax")
    lowest = groups.extreme(metric.masked_fill(left_out, torch.inf), "amin")
    size = groups.extreme(metric.masked_fill(left_out, 0.0).abs(), "amax")
    return (highest - lowest > ROUNDING * size) | groups.singleton
