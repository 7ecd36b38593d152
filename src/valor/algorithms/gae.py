"""Generalised advantage estimation with a critic (Schulman et al. 2015, https://arxiv.org/abs/1506.02438)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from valor.algorithms.reductions import keep_masked, last_token, masked_whiten
from valor.algorithms.registry import choose, register_advantage
from valor.algorithms.scan import at_next_token, credit_policy_tokens, suffix_scan
from valor.algorithms.turns import Turns
from valor.errors import UserError

GAE_UNITS: tuple[str, ...] = ("token", "turn", "bilevel")


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
    lam_positions: Sequence[float] | None = None,
    bootstrap_mask: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    whitening: str = "batch",
    reward_on_masked: str = "carry",
    gae_unit: str = "token",
    turn_ids: Tensor | None = None,
    gamma_turn: float = 1.0,
    lam_turn: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """A_t = δ_t + γλ A_{t'}, δ_t = r_t + γ V_{t'} − V_t, return_t = A_t + V_t; t' is the next POLICY token after t
    (https://arxiv.org/abs/1506.02438).

    Observation tokens inside a response (mask 0) are stepped over: they neither discount, nor decay, nor contribute a
    value, and their values are never read. All inputs and outputs [B, T]. A plain loop: docs/algorithms/ppo.md.

    lam_actor, lam_critic: decoupled GAE (VC-PPO, https://arxiv.org/abs/2503.01491): λ of the advantages and of the
        returns; None takes `lam`.
    adaptive_lam_alpha: α of VAPO's length-adaptive λ (https://arxiv.org/abs/2504.05118): the advantages of a row with
        l policy tokens use λ = 1 − 1/(αl), at least 0; replaces lam_actor.
    lam_positions: λ of the advantages at evenly spaced places, first to last policy token of a row, linear between
        them (`lam_along`); replaces lam_actor.
    bootstrap_mask [B]: rows that were cut off, whose end is not terminal: V after the last policy token is
        bootstrap_values [B] (default: the value at the last policy token) instead of 0.
    whitening: "batch" (over the mask of what is given) or "none"; returns are never whitened.
    reward_on_masked: a reward on a masked position goes to the last policy token before it ("carry"), or is lost
        ("drop", as in verl).
    gae_unit: what one step of the recursion is: "token"; "turn" (`_turn_gae`) or "bilevel" (`_gae_inside_turns`), with
        turn_ids [B, T], the number of each policy token's turn, and gamma_turn, lam_turn between turns.
    Degenerate: a row without policy tokens is all 0; λ = 0 is the TD error, λ = 1 the Monte-Carlo return minus V.
    """
    lambdas = (lam if lam_actor is None else lam_actor, lam if lam_critic is None else lam_critic)
    response_mask, rewards = response_mask.to(values.dtype), rewards.to(values.dtype)
    if not all(0.0 <= share <= 1.0 for share in (gamma, *lambdas, gamma_turn, lam_turn, *(lam_positions or ()))):
        raise UserError("gamma and lam, gamma_turn and lam_turn, lam_positions must be between 0 and 1")
    end = None if bootstrap_mask is None else (bootstrap_mask, bootstrap_values)
    rewards = credit_policy_tokens(rewards, response_mask, reward_on_masked)
    if choose(gae_unit, GAE_UNITS, "gae_unit") == "token":
        if not gamma_turn == lam_turn == 1.0:
            raise UserError("gae_unit=token has no turns to discount: leave gamma_turn and lam_turn at 1")
        by_row = _lam_by_row(adaptive_lam_alpha, lam_positions, response_mask)
        of_rows = (lambdas[0] if by_row is None else by_row, lambdas[1])
        advantages, returns = token_gae(rewards, values, response_mask, gamma, of_rows, end)
    else:
        if adaptive_lam_alpha is not None or lam_positions:
            raise UserError(f"gae_unit={gae_unit} takes neither adaptive_lam_alpha nor lam_positions: use token")
        turns = Turns(turn_ids, response_mask)
        assert bool(turns.in_order.all()), "turn_ids of policy tokens are to rise along a row, from 1"
        advantages, returns = _turn_gae(gae_unit, rewards, values, turns, (gamma_turn, lam_turn), gamma, lambdas, end)
    return masked_whiten(advantages, response_mask, scope=whitening), returns


End = tuple[Tensor, Tensor | None]  # which rows were cut off [B], and their value after the end [B]


def token_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lambdas: tuple[float | Tensor, float | Tensor],
    end: End | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] of `gae` before whitening, from rewards that are 0 at masked positions.

    lambdas: of the advantages and of the returns; each a number, [B, 1] or [B, T].
    """
    value = keep_masked(values, mask)
    if end is not None:
        rewards = add_end_values(rewards, value, mask, *end, gamma)

    def by(lam: float | Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(lam, Tensor) and lam == 1.0:  # the TD errors add up to the return minus V
            target = suffix_scan(rewards, gamma, mask)
            return target - value, target
        delta = rewards + gamma * at_next_token(value, mask) - value
        advantage = suffix_scan(delta, gamma * lam, mask)
        return advantage, advantage + value

    advantages, returns = by(lambdas[0])
    return advantages, returns if lambdas[1] is lambdas[0] else by(lambdas[1])[1]


def _turn_gae(
    unit: str,
    rewards: Tensor,
    values: Tensor,
    turns: Turns,
    turn_discounts: tuple[float, float],
    gamma: float,
    lambdas: tuple[float, float],
    end: End | None,
) -> tuple[Tensor, Tensor]:
    """A turn as one action (Turn-PPO, https://arxiv.org/abs/2512.17008; https://github.com/sail-sg/oat/pull/63):
    A_k = δ_k + γλ A_{k+1}, δ_k = R_k + γ V_{k+1} − V_k with γ_turn, λ_turn; each token of turn k has A_k and the return
    A_k + V_k. Unit bilevel: `_gae_inside_turns`, of these returns.

    R_k: Σ of the turn's rewards. V_k: the value at its first policy token, the state before the turn is taken. No other
    value is read: the critic is to be trained there alone (`Turns.starts`).
    An episode of one turn: A = Σ r − V_first, REINFORCE with the value of the prompt as baseline.
    """
    reward, value = turns.total(rewards), turns.first(values)
    gamma_turn, lam_turn = turn_discounts
    advantage, target = token_gae(reward, value, turns.present, gamma_turn, (lam_turn, lam_turn), end)
    if unit == "bilevel":
        return _gae_inside_turns(rewards, values, turns, turns.spread(target - reward), gamma, lambdas)
    if not gamma == lambdas[0] == lambdas[1] == 1.0:
        raise UserError(
            "gae_unit=turn has no tokens to discount: set gamma_turn and lam_turn, leave gamma and lam at 1"
        )
    return turns.spread(advantage), turns.spread(target)


def _gae_inside_turns(
    rewards: Tensor, values: Tensor, turns: Turns, after: Tensor, gamma: float, lambdas: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """GAE over the tokens of each turn, by γ and λ, where `after` [B, T] follows the turn: of turn k it is
    C_k = γ_turn (V_{k+1} + λ_turn A_{k+1}), the return of `_turn_gae` without R_k. δ_t = r_t + γ V_{t+1} − V_t and
    A_t = δ_t + γλ A_{t+1} inside the turn, A_t = r_t + C_k − V_t at its last token.

    Bi-Level GAE (VAGEN, https://arxiv.org/abs/2510.16907), which puts the turn's return at its last token in the same
    way. VAGEN chains turns by the values at their last tokens, which know the action already; here it is the values at
    their first tokens. At λ_turn = 1 no such value is left and the numbers are the same. An episode of one turn is
    plain GAE; turns of one token are the unit turn; at γ = γ_turn = λ = λ_turn = 1 all is plain GAE.
    """
    mask, value = turns.mask, keep_masked(values, turns.mask)
    goes_on = at_next_token(mask - turns.starts.to(mask.dtype), mask)  # 1: the next policy token is of the same turn
    delta = rewards - value + after * (1.0 - goes_on) + gamma * at_next_token(value, mask) * goes_on
    advantages, returns = (suffix_scan(delta, gamma * lam * goes_on, mask) for lam in lambdas)
    return advantages, returns + value


def _lam_by_row(alpha: float | None, lam_positions: Sequence[float] | None, mask: Tensor) -> Tensor | None:
    """λ of the advantages, [B, 1] by the length of the row or [B, T] by position; None: one number."""
    if alpha is None:
        return lam_along(lam_positions, mask) if lam_positions else None
    if lam_positions:
        raise UserError("adaptive_lam_alpha and lam_positions both say which lambda the advantages have: drop one")
    if alpha <= 0:
        raise UserError(f"adaptive_lam_alpha must be positive, got {alpha}")
    return (1.0 - 1.0 / (alpha * mask.sum(1, keepdim=True).clamp(min=1).double())).clamp(min=0.0)


def lam_along(lam_positions: Sequence[float], response_mask: Tensor) -> Tensor:
    """[B, T] λ at each policy token: lam_positions[0] at a row's first one, lam_positions[-1] at its last, and linear
    between those that are given."""
    points = torch.tensor([*lam_positions, lam_positions[-1]], dtype=torch.float64, device=response_mask.device)
    number = response_mask.double().cumsum(1)
    at = (number - 1).clamp(min=0) * (len(lam_positions) - 1) / (number[:, -1:] - 1).clamp(min=1)
    left = at.floor().long()
    return points[left].lerp(points[left + 1], at - left)


def add_end_values(
    rewards: Tensor, values: Tensor, response_mask: Tensor, cut_off: Tensor, end_values: Tensor | None, gamma: float
) -> Tensor:
    """Rewards plus γ V(end) at the last policy token of rows that were cut off; V(end): that token's value if None."""
    last = last_token(response_mask).unsqueeze(1)
    end = values.gather(1, last) if end_values is None else end_values.to(values.dtype).unsqueeze(1)
    applies = (cut_off.bool() & response_mask.any(1)).unsqueeze(1)
    return rewards.scatter_add(1, last, (gamma * end).masked_fill(~applies, 0.0))
