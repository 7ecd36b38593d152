"""REINFORCE with global or greedy baselines: returns to go, whitened over the batch or minus a rollout's reward."""

import torch
from torch import Tensor

from valor.algorithms.groups import SINGLETON, GroupIds, Groups, sequence_scores, spread_over_tokens
from valor.algorithms.reductions import masked_whiten
from valor.algorithms.registry import choose
from valor.algorithms.scan import Packing, over_rows, result_like, suffix_scan


def returns_to_go(
    rewards: Tensor, response_mask: Tensor, gamma: float, reward_on_masked: str = "carry", zero_masked: bool = True
) -> Tensor:
    """G_t = r_t + γ G_{t'}, t' the next policy token; [B, T]. Masked positions do not discount and are 0, or, with
    zero_masked=False, what the next policy token has."""
    response_mask = response_mask.to(rewards.dtype)
    returns = result_like(rewards)

    def of_rows(rows: slice) -> None:
        packing = Packing(response_mask[rows], in_place=gamma == 1.0)
        scanned = suffix_scan(packing.pack_rewards(rewards[rows], reward_on_masked), gamma)
        if zero_masked:
            packing.unpack(scanned, out=returns[rows])
        else:
            returns[rows] = packing.unpack_carried(scanned)

    over_rows(of_rows, rewards)
    return returns


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
    groups = Groups(group_ids, rewards.shape[0], rewards.device)
    scores = sequence_scores(rewards, response_mask)
    choose(singleton, SINGLETON, "singleton")
    centred = scores.double() - groups.mean(scores).masked_fill(groups.singleton, 0.0)
    advantage = spread_over_tokens(centred, response_mask)
    masked_whiten(advantage, response_mask, scope=whitening, out=advantage)
    if singleton == "zero" and bool(groups.singleton.any()):
        advantage.masked_fill_(groups.singleton.unsqueeze(1), 0.0)
    return advantage, advantage


def remax(
    *,
    rewards: Tensor,
    response_mask: Tensor,
    reward_baselines: Tensor,
    reward_on_masked: str = "carry",
    zero_masked: bool = True,
) -> tuple[Tensor, Tensor]:
    """ReMax: A_t = Σ_{t' ≥ t} r_t' - b_i, b_i [B] the reward of the greedy response to the same prompt
    (https://arxiv.org/abs/2310.10505); returns are the sums.

    zero_masked: False leaves the sums at masked positions, in both, as verl does. reward_on_masked as in `gae`.
    """
    returns = returns_to_go(rewards, response_mask, 1.0, reward_on_masked, zero_masked)
    baselines = reward_baselines.to(returns.dtype).unsqueeze(-1)
    mask = response_mask.to(returns.dtype)
    return torch.addcmul(returns, mask, baselines, value=-1.0, out=result_like(returns)), returns
