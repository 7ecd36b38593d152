"""Generalised advantage estimation with a critic (Schulman et al. 2015, https://arxiv.org/abs/1506.02438)."""

from functools import reduce

import torch
from torch import Tensor

from valor.algorithms.reductions import Moments, last_token, masked_whiten, over_rows, result_like, zeroed
from valor.algorithms.registry import register_advantage
from valor.algorithms.scan import Packing, at_next_policy_token, credit_policy_tokens, suffix_scan, sums_to_go
from valor.errors import UserError


def gae_by_loop(
    rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float | Tensor, end_values: Tensor
) -> Tensor:
    """The definition, token by token from the end: advantages [B, T] before whitening; `gae` gives the same, faster.

    end_values [B]: V after the last policy token, 0 where the end is terminal. lam: one λ, or one per row [B].
    """
    advantages = torch.zeros_like(values)
    next_advantage, next_value, pending = torch.zeros_like(end_values), end_values, torch.zeros_like(end_values)
    for t in reversed(range(values.shape[1])):
        is_policy = response_mask[:, t] == 1
        reward = rewards[:, t] + pending  # a reward on an observation belongs to the policy token before it
        delta = reward + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = advantage.where(is_policy, 0.0)
        # An observation token is stepped over: it hands on what came after it.
        next_advantage = advantage.where(is_policy, next_advantage)
        next_value = values[:, t].where(is_policy, next_value)
        pending = reward.masked_fill(is_policy, 0.0)
    return advantages


@register_advantage("gae", needs_critic=True)
def gae(
    *,
    rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    lam_actor: float | None = None,
    lam_critic: float | None = None,
    adaptive_lam_alpha: float | None = None,
    bootstrap_mask: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    whitening: str = "batch",
    reward_on_masked: str = "carry",
    zero_masked: bool = True,
) -> tuple[Tensor, Tensor]:
    """A_t = δ_t + γλ A_{t'}, δ_t = r_t + γ V_{t'} − V_t, return_t = A_t + V_t; t' is the next POLICY token after t
    (https://arxiv.org/abs/1506.02438).

    Observation tokens inside a response (mask 0) are stepped over: they neither discount, nor decay, nor contribute a
    value, and their values are never read. All inputs and outputs [B, T]. `gae_by_loop` is the plain form.

    lam_actor, lam_critic: decoupled GAE (VC-PPO, https://arxiv.org/abs/2503.01491): λ of the advantages and of the
        returns; None takes `lam`.
    adaptive_lam_alpha: α of VAPO's length-adaptive λ (https://arxiv.org/abs/2504.05118): the advantages of a row with
        l policy tokens use λ = 1 − 1/(αl), at least 0; replaces lam_actor.
    bootstrap_mask [B]: rows that were cut off, whose end is not terminal: V after the last policy token is
        bootstrap_values [B] (default: the value at the last policy token) instead of 0.
    whitening: "batch" (over the mask of what is given) or "none"; returns are never whitened.
    reward_on_masked: a reward on a masked position goes to the last policy token before it ("carry"), or is lost
        ("drop", as in verl).
    zero_masked: False leaves at masked positions what the recursion carries, whitened, as verl does.
    Degenerate: a row without policy tokens is all 0; λ = 0 is the TD error, λ = 1 the Monte-Carlo return minus V.
    """
    if adaptive_lam_alpha is not None and adaptive_lam_alpha <= 0:
        raise UserError(f"adaptive_lam_alpha must be positive, got {adaptive_lam_alpha}")
    lam_actor = lam if lam_actor is None else lam_actor
    lam_critic = lam if lam_critic is None else lam_critic
    response_mask, rewards = response_mask.to(values.dtype), rewards.to(values.dtype)
    advantages, returns = result_like(values), result_like(values)
    decay: float | Tensor = gamma * lam_actor
    if adaptive_lam_alpha is not None:
        lengths = response_mask.sum(1).clamp(min=1).double()
        decay = gamma * (1.0 - 1.0 / (adaptive_lam_alpha * lengths)).clamp(min=0.0)
    if bootstrap_mask is not None:
        rewards = _add_end_values(rewards, values, response_mask, bootstrap_mask, bootstrap_values, gamma)
    one_lambda = adaptive_lam_alpha is None and lam_actor == lam_critic
    # Where nothing decays, Σ δ is Σ r − V whatever lies between: no token needs to move.
    telescopes = one_lambda and gamma == lam_actor == 1.0 and bootstrap_mask is None and zero_masked

    def of_rows(rows: slice) -> Moments:
        mask = response_mask[rows]
        value = zeroed(values[rows], mask)
        if telescopes:
            target = sums_to_go(rewards[rows], mask, reward_on_masked, out=returns[rows])
            return Moments.of(torch.sub(target, value, out=advantages[rows]), mask)
        reward = credit_policy_tokens(rewards[rows], mask, reward_on_masked)
        packing = Packing(mask)
        packed_value = packing.pack(value)
        delta = packing.pack(reward).sub_(packed_value)
        delta[:, :-1].add_(packed_value[:, 1:], alpha=gamma)
        advantage = suffix_scan(delta, decay[rows] if isinstance(decay, Tensor) else decay)
        target = advantage if one_lambda else suffix_scan(delta, gamma * lam_critic)
        advantage = packing.unpack(advantage, out=advantages[rows])
        target = advantage if one_lambda else packing.unpack(target, out=returns[rows])
        moments = Moments.of(advantage, mask)
        if not zero_masked:
            target = at_next_policy_token(target, mask)
            advantages[rows] = at_next_policy_token(advantage, mask)
            value = values[rows]
        torch.add(target, value, out=returns[rows])
        return moments

    moments = reduce(Moments.merge, over_rows(of_rows, values), Moments())
    masked_whiten(advantages, response_mask, scope=whitening, zero_masked=zero_masked, moments=moments, out=advantages)
    return advantages, returns


def _add_end_values(
    rewards: Tensor, values: Tensor, response_mask: Tensor, cut_off: Tensor, end_values: Tensor | None, gamma: float
) -> Tensor:
    """Rewards plus γ V(end) at the last policy token of rows that were cut off; V(end): that token's value if None."""
    last = last_token(response_mask).unsqueeze(1)
    end = values.gather(1, last) if end_values is None else end_values.to(values.dtype).unsqueeze(1)
    applies = (cut_off.bool() & response_mask.any(1)).unsqueeze(1)
    return rewards.scatter_add(1, last, (gamma * end).masked_fill(~applies, 0.0))
