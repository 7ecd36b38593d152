"""Which samples are trained on: dynamic sampling (DAPO)."""

from torch import Tensor

from valor.algorithms.groups import GroupIds, Groups


def filter_groups(metric: Tensor, group_ids: GroupIds) -> Tensor:
    """[B] bool: samples of groups whose metric [B] is not the same for all, as only these carry a group-relative signal
    (DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476). A group of one, which cannot differ, is kept."""
    groups = Groups(group_ids, metric.shape[0], metric.device)
    return (groups.extreme(metric, "amax") != groups.extreme(metric, "amin")) | groups.singleton
