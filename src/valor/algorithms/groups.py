"""Statistics of groups (the samples of one prompt) by scatter, in float64, without a loop over samples.

float64 makes the mean of equal float32 scores exactly that score, so that a group which agrees has advantage 0.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from valor.algorithms.registry import choose
from valor.errors import UserError

SINGLETON: tuple[str, ...] = ("zero", "raw")

GroupIds = Tensor | Sequence[Any]

ROUNDING = 1e-6  # relative: eight times the distance of two float32 numbers


def group_index(group_ids: GroupIds | None, size: int, device: torch.device | None = None) -> Tensor:
    """[B] int64 index 0..G−1 from ids of any kind: tensor, array, or a list of ints or strings."""
    if group_ids is None:
        raise UserError("this estimator compares samples of one prompt: pass group_ids, one id per sample")
    if isinstance(group_ids, Tensor):
        index = torch.unique(group_ids, return_inverse=True)[1]
    else:
        numbers: dict[Any, int] = {}  # in order of first appearance
        ids: Any = group_ids
        ids = ids.tolist() if hasattr(ids, "tolist") else ids  # numpy's elements hash slowly
        index = torch.tensor([numbers.setdefault(group, len(numbers)) for group in ids], dtype=torch.int64)
    if index.shape != (size,):
        raise UserError(f"group_ids must hold one id per sample: {size} samples, ids of shape {tuple(index.shape)}")
    return index.to(device)


class Groups:
    """The groups of B samples: index [B], and statistics of a [B] score per group, spread back to [B]."""

    def __init__(self, group_ids: GroupIds | None, size: int, device: torch.device) -> None:
        self.index = group_index(group_ids, size, device)
        self.number = int(self.index.max()) + 1 if size else 0
        ones = torch.ones(size, dtype=torch.float64, device=device)
        self.sizes = self.spread(self.total(ones))
        self.singleton = self.sizes == 1

    def total(self, x: Tensor) -> Tensor:
        """[G] sum of x [B] per group."""
        return torch.zeros(self.number, dtype=torch.float64, device=x.device).index_add_(0, self.index, x.double())

    def spread(self, per_group: Tensor) -> Tensor:
        """[G] to [B]: every sample gets its group's number."""
        return per_group[self.index]

    def mean(self, x: Tensor) -> Tensor:
        """[B] mean of the sample's group."""
        return self.spread(self.total(x)) / self.sizes

    def mean_of_others(self, x: Tensor) -> Tensor:
        """[B] mean of the group's other samples; NaN for a group of one."""
        return (self.spread(self.total(x)) - x.double()) / (self.sizes - 1)

    def std(self, x: Tensor) -> Tensor:
        """[B] standard deviation of the sample's group, with Bessel's correction; 0 for a group of one."""
        squares = self.total((x.double() - self.mean(x)).square())
        return (self.spread(squares) / (self.sizes - 1).clamp(min=1)).sqrt()

    def extreme(self, x: Tensor, kind: str) -> Tensor:
        """[B] largest ("amax") or smallest ("amin") x in the sample's group."""
        empty = torch.zeros(self.number, dtype=x.dtype, device=x.device)
        return self.spread(empty.scatter_reduce(0, self.index, x, kind, include_self=False))


def mean_of_others(outcomes: Tensor, prompts: Sequence[str]) -> Tensor:
    """[E] float64 mean outcome of the prompt's other samples; of all others where it has none; NaN of one alone."""
    prompt, batch = (Groups(ids, len(outcomes), outcomes.device) for ids in (prompts, [0] * len(outcomes)))
    return torch.where(prompt.singleton, batch.mean_of_others(outcomes), prompt.mean_of_others(outcomes))


def sequence_scores(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """[B] sum of a row's rewards, those on masked positions included; non-finite filler there is ignored."""
    scores = rewards.sum(-1)
    if not bool(scores.isfinite().all()):
        scores = rewards.masked_fill((response_mask == 0) & ~rewards.isfinite(), 0.0).sum(-1)
    return scores


def scored_groups(rewards: Tensor, response_mask: Tensor, group_ids: GroupIds | None) -> tuple[Groups, Tensor]:
    """The groups of the rows, and each row's score [B]: one for all rows of a group that differ in the rounding of
    float32 alone, as sums of several rewards do. A standard deviation would make advantages of that."""
    groups, scores = Groups(group_ids, len(rewards), rewards.device), sequence_scores(rewards, response_mask)
    highest = groups.extreme(scores, "amax")
    rounding = ROUNDING * groups.extreme(sequence_scores(rewards.abs(), response_mask), "amax")
    return groups, torch.where(highest - groups.extreme(scores, "amin") <= rounding, highest, scores)


def spread_over_tokens(advantage: Tensor, response_mask: Tensor) -> Tensor:
    """[B] to [B, T]: the sample's advantage at each policy token, 0 elsewhere."""
    return advantage.float().unsqueeze(-1) * response_mask


def settle_singletons(advantage: Tensor, raw: Tensor, groups: Groups, singleton: str) -> Tensor:
    """Advantage [B] with groups of one set to 0 ("zero": nothing to compare with) or to `raw` ("raw": as verl)."""
    choose(singleton, SINGLETON, "singleton")
    return torch.where(groups.singleton, raw.double() if singleton == "raw" else 0.0, advantage)
