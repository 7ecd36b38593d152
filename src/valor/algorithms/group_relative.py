"""Critic-free estimators that compare the samples of one prompt.

Every estimator gives one number per sample, spread over its policy tokens; returns equal advantages. s_i is the sum of
the rewards of sample i, n the size of its group. Groups whose samples all agree have exactly 0, gdpo before whitening.
singleton: groups of one have nothing to compare with: "zero", or "raw" for what verl does.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from valor.algorithms.groups import GroupIds, Groups, scored_groups, settle_singletons, spread_over_tokens
from valor.algorithms.reductions import masked_whiten
from valor.algorithms.registry import register_advantage
from valor.errors import UserError


def grpo_scores(scores: Tensor, groups: Groups, norm_by_std: bool, singleton: str) -> Tensor:
    """[B] (s − mean) / (std + 1e-6) per group; verl gives a group of one mean 0 and std 1."""
    centred = scores.double() - groups.mean(scores)
    advantage = centred / (groups.std(scores) + 1e-6) if norm_by_std else centred
    return settle_singletons(advantage, scores / (1.0 + 1e-6) if norm_by_std else scores, groups, singleton)


@register_advantage("grpo", min_group_size=2)
def grpo(
    *,
    rewards: Tensor,
    response_mask: Tensor,
    group_ids: GroupIds | None,
    norm_adv_by_std_in_grpo: bool = True,
    singleton: str = "zero",
) -> tuple[Tensor, Tensor]:
    """GRPO: A_i = (s_i − mean) / (std + 1e-6), std with n − 1 (https://arxiv.org/abs/2402.03300).

    DrGRPO (https://arxiv.org/abs/2503.20783): norm_adv_by_std_in_grpo=False, with loss_agg_mode
    seq-mean-token-sum-norm, a fixed loss_scale_factor and no KL loss.
    """
    groups, scores = scored_groups(rewards, response_mask, group_ids)
    advantage = spread_over_tokens(grpo_scores(scores, groups, norm_adv_by_std_in_grpo, singleton), response_mask)
    return advantage, advantage


@register_advantage("grpo_passk", min_group_size=2, paper="https://arxiv.org/abs/2503.19595")
def grpo_passk(
    *, rewards: Tensor, response_mask: Tensor, group_ids: GroupIds | None, norm_adv_by_std_in_grpo: bool = True
) -> tuple[Tensor, Tensor]:
    """Pass@k training with k = n: the best sample gets s_max − s_second, over (std + 1e-6) if normalised, the others 0.

    It is what the group's best score would lose without that sample (https://arxiv.org/abs/2503.19595). A tie for the
    best gives 0; a group of one gives 0 (verl raises).
    """
    groups, scores = scored_groups(rewards, response_mask, group_ids)
    number = torch.arange(scores.shape[0], device=scores.device)
    best = scores == groups.extreme(scores, "amax")
    first_best = number == groups.extreme(number.masked_fill(~best, scores.shape[0]), "amin")
    second = groups.extreme(scores.masked_fill(first_best, -torch.inf), "amax")
    gap = torch.where(first_best & ~groups.singleton, scores.double() - second, 0.0)
    if norm_adv_by_std_in_grpo:
        gap = gap / (groups.std(scores) + 1e-6)
    advantage = spread_over_tokens(gap, response_mask)
    return advantage, advantage


@register_advantage("rloo", min_group_size=2)
def rloo(
    *, rewards: Tensor, response_mask: Tensor, group_ids: GroupIds | None, singleton: str = "zero"
) -> tuple[Tensor, Tensor]:
    """RLOO: A_i = s_i − mean of the other samples = n/(n−1) · (s_i − mean) (https://arxiv.org/abs/2402.14740)."""
    groups, scores = scored_groups(rewards, response_mask, group_ids)
    centred = (scores.double() - groups.mean(scores)) * groups.sizes / (groups.sizes - 1).clamp(min=1)
    advantage = spread_over_tokens(settle_singletons(centred, scores, groups, singleton), response_mask)
    return advantage, advantage


@register_advantage("opo", min_group_size=2)
def opo(
    *, rewards: Tensor, response_mask: Tensor, group_ids: GroupIds | None, singleton: str = "zero"
) -> tuple[Tensor, Tensor]:
    """OPO: A_i = s_i − Σ l·s / Σ l, the variance-optimal baseline when the squared norm of the score function grows
    with the length l, in policy tokens (https://arxiv.org/abs/2505.23585).

    A group without any policy token has baseline 0 (and no token to show it at).
    """
    groups, scores = scored_groups(rewards, response_mask, group_ids)
    lengths = response_mask.sum(-1).double()
    centred = scores.double() - groups.mean(scores)
    # The baseline relative to the mean: exactly 0 for scores that agree.
    shift = groups.spread(groups.total(lengths * centred) / groups.total(lengths).clamp(min=1.0))
    centred = centred - shift
    advantage = spread_over_tokens(settle_singletons(centred, scores, groups, singleton), response_mask)
    return advantage, advantage


@register_advantage("gpg", min_group_size=2, natural_loss="gpg")
def gpg(
    *, rewards: Tensor, response_mask: Tensor, group_ids: GroupIds | None, f_norm: float = 1.0, singleton: str = "zero"
) -> tuple[Tensor, Tensor]:
    """GPG: A_i = α (s_i − mean) / f_norm, α = B / #{s ≠ 0} (https://arxiv.org/abs/2504.02546).

    α makes up for samples that carry no signal; it is B itself where every score is 0 (and every A is 0).
    """
    groups, scores = scored_groups(rewards, response_mask, group_ids)
    alpha = scores.shape[0] / scores.count_nonzero().clamp(min=1)
    centred = settle_singletons(scores.double() - groups.mean(scores), scores, groups, singleton)
    advantage = spread_over_tokens(alpha * centred / f_norm, response_mask)
    return advantage, advantage


@register_advantage("gdpo", min_group_size=2, needs_components=True)
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
    left_out = groups.singleton.unsqueeze(1) & (singleton == "zero")
    compared = response_mask.masked_fill(left_out, 0.0)
    advantage = masked_whiten(spread_over_tokens(total, response_mask), compared, scope=whitening)
    return advantage, advantage
