"""What several critics that have learnt from different samples tell together (AsyPPO, https://arxiv.org/abs/2510.01656)."""

import torch
from torch import Tensor

from valor.algorithms.groups import GroupIds, group_index


def shards(group_ids: GroupIds, members: int) -> Tensor:
    """[B] int64: the critic, 0 … members − 1, that learns from each sample: the j-th sample of the i-th prompt goes to
    critic (i + j) mod members, so that each has its own part of every group, and their parts are as large."""
    index = group_index(group_ids, len(group_ids))
    seen: dict[int, int] = {}
    place = []
    for group in index.tolist():
        seen[group] = seen.get(group, -1) + 1
        place.append(seen[group])
    return (index + torch.tensor(place, dtype=torch.int64)) % members


def where_critics_tell(values: Tensor, response_mask: Tensor, agree: float, diverge: float) -> tuple[Tensor, Tensor]:
    """Two [B, T] masks from the critics' values [K, B, T], by their standard deviation at each of N policy tokens.

    The first is 0 at the ⌊agree N⌋ tokens where it is smallest: the critics agree there, and the advantage is left out.
    The second is 0 at the ⌊diverge N⌋ tokens where it is largest: there the entropy bonus is. Fewer where deviations
    are equal: tokens like the first that stays, stay.
    """
    spread, here = values.double().std(0), response_mask.bool()
    ordered = spread[here].sort().values
    number = len(ordered)
    if not number:
        return response_mask.float(), response_mask.float()
    lowest = ordered[min(int(agree * number), number - 1)]
    highest = ordered[max(number - 1 - int(diverge * number), 0)]
    return (here & (spread >= lowest)).float(), (here & (spread <= highest)).float()
