"""REINFORCE with baselines: of the batch, of a greedy response, or the one of least variance at each step."""

import torch
from torch import Tensor

from valor.algorithms.groups import SINGLETON, GroupIds, Groups, scored_groups, spread_over_tokens
from valor.algorithms.reductions import keep_masked, masked_whiten
from valor.algorithms.registry import choose, register_advantage
from valor.algorithms.scan import returns_to_go


@register_advantage("reinforce_plus_plus")
def reinforce_plus_plus(
    *,
    rewards: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    whitening: str = "batch",
    reward_on_masked: str = "carry",
) -> tuple[Tensor, Tensor]:
    """REINFORCE++: A = whiten(G), G_t = r_t + γ G_{t'} (https://arxiv.org/abs/2501.03262); returns are G, unwhitened.

    Observation tokens neither discount nor break the chain. reward_on_masked as in `gae`.
    """
    returns = returns_to_go(rewards, response_mask, gamma, reward_on_masked)
    return masked_whiten(returns, response_mask, scope=whitening), returns


@register_advantage("reinforce_plus_plus_baseline", min_group_size=2)
def reinforce_plus_plus_baseline(
    *,
    rewards: Tensor,
    response_mask: Tensor,
    group_ids: GroupIds | None,
    whitening: str = "batch",
    singleton: str = "zero",
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with a group baseline: A = whiten(s_i − mean of the group) over the batch's tokens
    (https://arxiv.org/abs/2501.03262); returns equal advantages.

    singleton: a group of one has no baseline of its own but its score is one of the batch: it takes part in the
    whitening; then its own row is 0 ("zero") or what the whitening made of it ("raw", as verl). Other rows are alike.
    """
    groups, scores = scored_groups(rewards, response_mask, group_ids)
    choose(singleton, SINGLETON, "singleton")
    centred = scores.double() - groups.mean(scores).masked_fill(groups.singleton, 0.0)
    advantage = masked_whiten(spread_over_tokens(centred, response_mask), response_mask, scope=whitening)
    if singleton == "zero":
        advantage = advantage.masked_fill(groups.singleton.unsqueeze(1), 0.0)
    return advantage, advantage


@register_advantage("remax", needs_greedy_baseline=True)
def remax(
    *, rewards: Tensor, response_mask: Tensor, reward_baselines: Tensor, reward_on_masked: str = "carry"
) -> tuple[Tensor, Tensor]:
    """ReMax: A_t = Σ_{t' ≥ t} r_t' - b_i, b_i [B] the reward of the greedy response to the same prompt
    (https://arxiv.org/abs/2310.10505); returns are the sums.

    reward_on_masked as in `gae`.
    """
    returns = returns_to_go(rewards, response_mask, 1.0, reward_on_masked)
    baselines = reward_baselines.to(returns.dtype).unsqueeze(-1)
    mask = response_mask.to(returns.dtype)
    return torch.addcmul(returns, mask, baselines, value=-1.0), returns


@register_advantage("optimal_token_baseline", min_group_size=2, needs_sum_pi_squared=True)
def optimal_token_baseline(
    *,
    rewards: Tensor,
    response_mask: Tensor,
    group_ids: GroupIds | None,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    compact: bool = False,
    reward_on_masked: str = "carry",
    singleton: str = "zero",
) -> tuple[Tensor, Tensor]:
    """A_it = G_it − B_t with B_t = Σ_i G_it W_it / Σ_i W_it over the group's samples that still run at step t
    (https://arxiv.org/abs/2602.07078).

    W_it = Σ_{t' ≤ t} w_it' accumulates w = 1 − 2π + Σ_v π(v)², the expected squared norm of the score function at the
    logits, times the squared importance weight when the rollout's weights [B, T] are given. G: undiscounted returns to
    go. π = exp(old_log_probs) and sum_pi_squared [B, T] come from the actor.
    compact: align samples by their n-th policy token instead of by position, for responses with observation tokens.
    At positions that only one sample of a group reaches there is no one to compare with: B_t = 0, so that the tail of
    the longest response keeps a gradient. singleton: a group of one: advantage "zero", or "raw" (A = G, as verl).
    """
    groups = Groups(group_ids, rewards.shape[0], rewards.device)
    mask = response_mask.to(rewards.dtype)
    returns = returns_to_go(rewards, mask, 1.0, reward_on_masked)
    weight = 1.0 - 2.0 * old_log_probs.exp() + sum_pi_squared
    if rollout_is_weights is not None:
        weight = weight * rollout_is_weights * rollout_is_weights
    gain, weight, present = returns, keep_masked(weight, mask), mask
    token = (mask.cumsum(1) - 1).clamp(min=0).long()  # its number among the policy tokens of the row
    if compact:
        gain, weight, present = (torch.zeros_like(x).scatter_add(1, token, x) for x in (gain, weight, present))
    energy = weight.cumsum(1) * present
    baseline = _per_group(gain * energy, groups) / (_per_group(energy, groups) + 1e-8)
    baseline.masked_fill_(_per_group(present, groups) <= 1, 0.0)  # a step that only one sample reaches
    advantage = (gain - baseline.index_select(0, groups.index)) * present
    if choose(singleton, SINGLETON, "singleton") == "zero":
        advantage = advantage.masked_fill(groups.singleton.unsqueeze(1), 0.0)
    return (keep_masked(advantage.gather(1, token), mask) if compact else advantage), returns


def _per_group(x: Tensor, groups: Groups) -> Tensor:
    """[G, T] sums over the samples of each group, position by position."""
    return x.new_zeros(groups.number, x.shape[1]).index_add_(0, groups.index, x)
