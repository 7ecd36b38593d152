"""Recursions from the end of a response, which step over the tokens that the policy did not write.

Shapes: [R, T] is R rows of T positions; a mask is 1 at policy tokens. t' is the next policy token after t.
"""

import torch
from torch import Tensor
from torch.nn import functional

from valor.algorithms.reductions import keep_masked
from valor.algorithms.registry import choose

REWARD_ON_MASKED: tuple[str, ...] = ("carry", "drop")


def suffix_scan(x: Tensor, decay: float | Tensor, mask: Tensor) -> Tensor:
    """y_t = x_t + decay_t · y_{t'} at policy tokens, 0 elsewhere; x [R, T], decay a number, [R] or [R, T].

    Summed in float64: the rounding of a decay near 1 would grow with the length.
    """
    wide = x.double().t().contiguous()  # a step reads one row of memory
    here = mask.bool().t().contiguous()
    decay = torch.as_tensor(decay, dtype=torch.float64, device=x.device)
    decays = (decay.t() if decay.ndim == 2 else decay).expand_as(wide)
    following = wide.new_zeros(wide.shape[1:])
    for t in reversed(range(len(wide))):
        following = torch.where(here[t], torch.addcmul(wide[t], decays[t], following), following)
        wide[t] = following
    return keep_masked(wide.t().to(x.dtype), mask)


def at_next_token(x: Tensor, mask: Tensor) -> Tensor:
    """[R, T] x at t', 0 where no policy token follows. x is read at policy tokens alone."""
    width = mask.shape[1]
    position = torch.arange(width, device=mask.device).where(mask.bool(), width)
    next_token = functional.pad(position, (0, 1), value=width)[:, 1:].flip(1).cummin(1).values.flip(1)
    return functional.pad(x, (0, 1)).gather(1, next_token)


def credit_policy_tokens(rewards: Tensor, mask: Tensor, on_masked: str) -> Tensor:
    """[R, T] rewards that are 0 at masked positions (a new tensor).

    on_masked: a reward there goes to the last policy token before it, else to the first one ("carry"), or is lost
    ("drop"). Non-finite filler at masked positions is ignored.
    """
    credited = keep_masked(rewards, mask)
    if choose(on_masked, REWARD_ON_MASKED, "reward_on_masked") == "drop" or torch.equal(credited, rewards):
        return credited
    finite = rewards.masked_fill(~mask.bool() & ~rewards.isfinite(), 0.0)
    position = torch.arange(mask.shape[1], device=mask.device)
    latest = torch.where(mask.bool(), position, mask.argmax(1, keepdim=True)).cummax(1).values
    return keep_masked(torch.zeros_like(credited).scatter_add_(1, latest, finite), mask)


def returns_to_go(rewards: Tensor, response_mask: Tensor, gamma: float, reward_on_masked: str = "carry") -> Tensor:
    """G_t = r_t + γ G_{t'}; [B, T]. Masked positions do not discount and are 0."""
    return suffix_scan(credit_policy_tokens(rewards, response_mask, reward_on_masked), gamma, response_mask)
