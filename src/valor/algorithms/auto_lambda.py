"""λ of the advantages by what the critic's error and the noise of outcomes do to a step's mean."""

import torch
from torch import Tensor

from valor.algorithms.reductions import masked_mean
from valor.algorithms.scan import at_next_token, suffix_scan

LAMBDAS: tuple[float, ...] = tuple(k / 20 for k in range(21))


def advantage_errors(
    rewards: Tensor, values: Tensor, value_error: Tensor, mask: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """Estimated mean squared error of one token's advantage by λ, [21] each: bias² and variance, over policy tokens.

    value_error [B, T]: e, as large as the values' errors and independent of these rewards. It adds
    γ (1 − λ) Σ_l (γλ)^l e_{t+l+1} to the advantage of token t, the bias; what it adds to all actions alike, −e_t, is
    left out. The variance is that of what follows the token: Σ_{l>0} (γλ)^l δ_{t+l}. Other inputs are those of `gae`,
    with rewards and values that are 0 where the mask is.
    """
    delta = rewards + gamma * at_next_token(values, mask) - values
    after = gamma * at_next_token(value_error, mask)
    bias, variance = [], []
    for lam in LAMBDAS:
        bias.append(masked_mean(((1 - lam) * suffix_scan(after, gamma * lam, mask)).square(), mask))
        variance.append(masked_mean((suffix_scan(delta, gamma * lam, mask) - delta).square(), mask))
    return torch.stack(bias), torch.stack(variance)


def least_error_lambda(
    rewards: Tensor, values: Tensor, value_error: Tensor, mask: Tensor, gamma: float
) -> tuple[float, float, float]:
    """λ, and its bias² and variance by `advantage_errors`: of the least bias² + variance / N with N responses, as noise
    is of each response and averages out, and a critic's error is the same for all. 1 where e is 0, as before the first
    fit: nothing is known of the error."""
    bias, variance = advantage_errors(rewards, values, value_error, mask, gamma)
    responses = (mask.sum(1) > 0).sum().clamp(min=1)
    best = int((bias + variance / responses).argmin()) if bool(bias.any()) else len(LAMBDAS) - 1
    return LAMBDAS[best], float(bias[best]), float(variance[best])
