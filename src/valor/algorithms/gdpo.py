"""GDPO: group-relative advantages per reward component, so that no component's spread drowns another's."""

from collections.abc import Mapping

import torch
from torch import Tensor

from valor.algorithms.group_relative import grpo_scores
from valor.algorithms.groups import GroupIds, Groups, spread_over_tokens
from valor.algorithms.reductions import masked_whiten
from valor.errors import UserError


def gdpo(
    *,
    rewards: Tensor,
    response_mask: Tensor,
    group_ids: GroupIds | None,
    component_scores: Mapping[str, Tensor] | None = None,
    component_weights: Mapping[str, float] | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    whitening: str = "batch",
    singleton: str = "zero",
) -> tuple[Tensor, Tensor]:
    """A = whiten(Σ_k w_k · GRPO(component k)) over the batch's tokens (https://arxiv.org/abs/2601.05242).

    component_scores: name to score [B]; component_weights: name to w_k, default 1 each; returns equal advantages.
    `rewards` is not read: the components take its place. singleton: a group of one is 0 and no part of the whitening
    ("zero"), or its raw scores are whitened with the rest ("raw", as verl).
    """
    if not component_scores:
        raise UserError("gdpo needs component_scores: the named reward components, one score per sample each")
    weights = dict.fromkeys(component_scores, 1.0) if component_weights is None else component_weights
    if set(weights) != set(component_scores):
        raise UserError(
            f"gdpo: component_weights name {sorted(weights)}, but the components are {sorted(component_scores)}"
        )
    groups = Groups(group_ids, response_mask.shape[0], response_mask.device)
    total = torch.zeros(response_mask.shape[0], dtype=torch.float64, device=response_mask.device)
    for key, scores in component_scores.items():
        total += weights[key] * grpo_scores(scores, groups, norm_adv_by_std_in_grpo, singleton)
    advantage = spread_over_tokens(total, response_mask)
    compared = response_mask
    if singleton == "zero" and bool(groups.singleton.any()):
        compared = response_mask.masked_fill(groups.singleton.unsqueeze(1), 0.0)
    masked_whiten(advantage, compared, scope=whitening, out=advantage)
    return advantage, advantage
