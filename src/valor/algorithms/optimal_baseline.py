"""Optimal token baseline: the per-step baseline of least variance, from the actor's own confidence."""

from torch import Tensor

from valor.algorithms.groups import SINGLETON, GroupIds, Groups
from valor.algorithms.registry import choose
from valor.algorithms.reinforce import returns_to_go
from valor.algorithms.scan import Packing


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
    """A_it = G_it − B_t with B_t = Σ_i G_it W_it / Σ_i W_it over the group's samples that still run at step t.

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
    weights = old_log_probs.exp().mul_(-2.0).add_(1.0).add_(sum_pi_squared)
    if rollout_is_weights is not None:
        weights.mul_(rollout_is_weights).mul_(rollout_is_weights)
    weights.masked_fill_(~mask.bool(), 0.0)
    packing = Packing(mask) if compact else None
    gain, weight, present = (x if packing is None else packing.pack(x) for x in (returns, weights, mask))

    energy = weight.cumsum(1).mul_(present)
    baseline = _per_group(gain * energy, groups) / (_per_group(energy, groups) + 1e-8)
    baseline.masked_fill_(_per_group(present, groups) <= 1, 0.0)  # a step that only one sample reaches
    advantage = (gain - baseline.index_select(0, groups.index)).mul_(present)
    if choose(singleton, SINGLETON, "singleton") == "zero" and bool(groups.singleton.any()):
        advantage.masked_fill_(groups.singleton.unsqueeze(1), 0.0)
    return (advantage if packing is None else packing.unpack(advantage)), returns


def _per_group(x: Tensor, groups: Groups) -> Tensor:
    """[G, T] sums over the samples of each group, position by position."""
    return x.new_zeros(groups.number, x.shape[1]).index_add_(0, groups.index, x)
