"""Generalised advantage estimation with a critic (Schulman et al. 2015, https://arxiv.org/abs/1506.02438)."""

from functools import reduce

import torch
from torch import Tensor

from valor.algorithms.reductions import WHITENING_SCOPES, Moments, masked_whiten
from valor.algorithms.registry import choose
from valor.algorithms.scan import Packing, over_rows, result_like, suffix_scan
from valor.errors import UserError


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
    """A_t = δ_t + γλ A_{t'}, δ_t = r_t + γ V_{t'} − V_t, return_t = A_t + V_t; t' is the next POLICY token after t.

    Observation tokens inside a response (mask 0) are stepped over: they neither discount, nor decay, nor contribute a
    value, and their values are never read. All inputs and outputs [B, T].

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
    response_mask, rewards = response_mask.to(values.dtype), rewards.to(values.dtype)
    advantages, returns = result_like(values), result_like(values)
    if adaptive_lam_alpha is not None and adaptive_lam_alpha <= 0:
        raise UserError(f"adaptive_lam_alpha must be positive, got {adaptive_lam_alpha}")
    lam_actor = lam if lam_actor is None else lam_actor
    lam_critic = lam if lam_critic is None else lam_critic
    # Without decay, Σ δ is Σ r − V whatever lies between: no token needs to move.
    undecayed = gamma == lam_actor == lam_critic == 1.0 and adaptive_lam_alpha is None
    in_place = undecayed and bootstrap_mask is None and zero_masked

    def of_rows(rows: slice) -> Moments:
        packing = Packing(response_mask[rows], in_place=in_place)
        value = packing.pack(values[rows])
        reward = packing.pack_rewards(rewards[rows], reward_on_masked)
        count = packing.counts.sum().item()
        if in_place:
            target = packing.unpack(suffix_scan(reward, 1.0), out=returns[rows])
            return Moments.of(torch.sub(target, value, out=advantages[rows]), count)
        if bootstrap_mask is not None:
            final = None if bootstrap_values is None else bootstrap_values[rows]
            reward = _add_bootstrap(reward, value, packing, bootstrap_mask[rows], final, gamma)
        delta = reward.sub_(value)
        delta[:, :-1].add_(value[:, 1:], alpha=gamma)

        if adaptive_lam_alpha is None:
            advantage = suffix_scan(delta, gamma * lam_actor)
        else:
            lengths = packing.counts.clamp(min=1).double()
            advantage = suffix_scan(delta, gamma * (1.0 - 1.0 / (adaptive_lam_alpha * lengths)).clamp(min=0.0))
        moments = Moments.of(packing.emptied(advantage), count)
        if adaptive_lam_alpha is None and lam_critic == lam_actor:
            target = advantage
        else:
            target = suffix_scan(delta, gamma * lam_critic)

        if zero_masked:
            packing.unpack(advantage, out=advantages[rows])
            packing.unpack(target.add_(value), out=returns[rows])
        else:
            advantages[rows] = packing.unpack_carried(advantage)
            returns[rows] = packing.unpack_carried(target) + values[rows]
        return moments

    moments = reduce(Moments.merge, over_rows(of_rows, values), Moments())
    if choose(whitening, WHITENING_SCOPES, "whitening") == "batch":
        masked_whiten(advantages, response_mask, zero_masked=zero_masked, moments=moments, out=advantages)
    return advantages, returns


def _add_bootstrap(
    reward: Tensor, value: Tensor, packing: Packing, cut_off: Tensor, final: Tensor | None, gamma: float
) -> Tensor:
    """Adds γ V(end) to the packed reward of the last policy token of rows that were cut off."""
    end_value = value.gather(1, packing.last) if final is None else final.to(reward.dtype).unsqueeze(1)
    applies = (cut_off.bool() & (packing.counts > 0)).unsqueeze(1)
    return reward.scatter_add(1, packing.last, (gamma * end_value).masked_fill(~applies, 0.0))
