"""Which samples are trained on: dynamic sampling (DAPO) and reward-weighted resampling (PF-PPO)."""

import torch
from torch import Tensor

from valor.algorithms.groups import GroupIds, Groups
from valor.algorithms.registry import choose
from valor.errors import UserError

PF_PPO_METHODS: tuple[str, ...] = ("pow", "max_min", "max_random")


def filter_groups(metric: Tensor, group_ids: GroupIds) -> Tensor:
    """[B] bool: samples of groups whose metric [B] is not the same for all, as only these carry a group-relative signal
    (DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476). A group of one, which cannot differ, is kept."""
    groups = Groups(group_ids, metric.shape[0], metric.device)
    return (groups.extreme(metric, "amax") != groups.extreme(metric, "amin")) | groups.singleton


def pf_ppo_weights(scores: Tensor, *, reweight_method: str = "pow", weight_pow: float = 2.0) -> Tensor:
    """[B] sampling weights from outcome scores [B] (PF-PPO, https://arxiv.org/abs/2409.06957).

    pow: |s|^weight_pow; max_min: 1 for the best and the worst score, else 0; max_random: 0.4 for the best, 0.1 for
    others. Every weight is at least 1e-8.
    """
    choose(reweight_method, PF_PPO_METHODS, "pf_ppo.reweight_method")
    if reweight_method == "pow":
        weights = scores.abs() ** weight_pow
    elif reweight_method == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).float()
    else:
        weights = torch.where(scores == scores.max(), 0.4, 0.1)
    return (weights + 1e-8).clamp(min=1e-8)


def pf_ppo_resample(
    scores: Tensor, *, reweight_method: str = "pow", weight_pow: float = 2.0, generator: torch.Generator | None = None
) -> Tensor:
    """[B] int64 sample indices drawn with replacement by `pf_ppo_weights`; every field of the batch follows them."""
    if not scores.numel():
        raise UserError("pf_ppo needs at least one sample")
    weights = pf_ppo_weights(scores, reweight_method=reweight_method, weight_pow=weight_pow)
    return torch.multinomial(weights, scores.shape[0], replacement=True, generator=generator)
