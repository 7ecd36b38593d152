"""λ of the advantages by what the critic's error and the noise of outcomes do to a step's mean."""

import torch
from torch import Tensor

from valor.algorithms.scan import at_next_token, suffix_scan

LAMBDAS: tuple[float, ...] = (*(k / 20 for k in range(20)), 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 1.0)
_TOKENS = 2**19  # of a batch, padding included: with more, responses at equal distances stand for all


def advantage_errors(
    rewards: Tensor, values: Tensor, value_error: Tensor, mask: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """Estimated mean squared error of a token's advantage by each of LAMBDAS: bias² and variance, over policy tokens.

    value_error [B, T]: e, as large as the values' errors and independent of these rewards. It adds
    γ (1 − λ) Σ_l (γλ)^l e_{t+l+1} to the advantage of token t, the bias; what it adds to all actions alike, −e_t, is
    left out. The variance is that of what follows the token: Σ_{l>0} (γλ)^l δ_{t+l}. Other inputs are those of `gae`,
    with rewards and values that are 0 where the mask is.
    """
    lambdas = torch.tensor(LAMBDAS, dtype=torch.float64)[:, None, None]
    count, rows = len(LAMBDAS), len(mask)

    def scan(x: Tensor) -> Tensor:
        decays = (gamma * lambdas).expand(count, rows, 1).flatten()
        return suffix_scan(x.double().repeat(count, 1), decays, mask.repeat(count, 1)).view(count, rows, mask.shape[1])

    delta = rewards + gamma * at_next_token(values, mask) - values
    bias = (1 - lambdas) * scan(gamma * at_next_token(value_error, mask))
    noise, tokens = scan(delta) - delta * mask, mask.sum().clamp(min=1)
    return bias.square().sum((1, 2)) / tokens, noise.square().sum((1, 2)) / tokens


def least_error_lambda(
    rewards: Tensor, values: Tensor, value_error: Tensor, mask: Tensor, gamma: float
) -> tuple[float, float, float]:
    """λ, and its bias² and variance by `advantage_errors`: of the least bias² + variance / N with N responses, as noise
    is of each response and averages out, and a critic's error is the same for all. 1 where e is 0, as before the first
    fit: nothing is known of the error."""
    present = mask.any(1).nonzero().flatten()
    most = max(1, _TOKENS // mask.shape[1])
    chosen = present if len(present) <= most else present[torch.linspace(0, len(present) - 1, most).long()]
    bias, variance = advantage_errors(*(x[chosen] for x in (rewards, values, value_error, mask)), gamma=gamma)
    best = int((bias + variance / max(1, len(present))).argmin()) if bool(bias.any()) else len(LAMBDAS) - 1
    return LAMBDAS[best], float(bias[best]), float(variance[best])
