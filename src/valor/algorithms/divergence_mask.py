"""DPPO: a trust region on the divergence between probabilities, not on their ratio."""

from torch import Tensor

from valor.algorithms.ppo import LossInputs, Metrics
from valor.errors import UserError


def dppo_tv(
    inputs: LossInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float | None = 3.0
) -> tuple[Tensor, Metrics]:
    """L = −A · sg(min(ρ, c)) · log π · keep; a token is kept while π − π_old ≤ high (A > 0) or ≥ −low (A ≤ 0): the
    total variation of the sampled token (https://arxiv.org/abs/2602.04879). Ratios of rare tokens are not
    punished. clip_ratio_c: c; None does not truncate.

    Metrics: pg_clipfrac (tokens not kept), ppo_kl.
    """
    change = inputs.log_probs.detach().exp() - inputs.old_log_probs.exp()
    keep = (change <= clip_ratio_high).where(inputs.advantages > 0, change >= -clip_ratio_low)
    return _truncated(inputs, keep, clip_ratio_c)


def dppo_kl(
    inputs: LossInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float | None = 3.0
) -> tuple[Tensor, Metrics]:
    """As `dppo_tv` with the KL of "this token or any other": p₀ log(p₀/p) + (1−p₀) log((1−p₀)/(1−p)), p₀ = π_old.

    Kept while it is ≤ high and A > 0 (≤ low and A ≤ 0), or the token moves against its advantage anyway.
    Metrics: pg_clipfrac (tokens not kept), ppo_kl.
    """
    log_probs, old_log_probs = inputs.log_probs.detach(), inputs.old_log_probs
    new, old = log_probs.exp(), old_log_probs.exp()
    others = (1.0 - old) * ((1.0 - old + 1e-8) / (1.0 - new + 1e-8)).log()
    divergence = old * (old_log_probs - log_probs) + others
    rising = (divergence <= clip_ratio_high) | (new <= old)
    falling = (divergence <= clip_ratio_low) | (new >= old)
    return _truncated(inputs, rising.where(inputs.advantages > 0, falling), clip_ratio_c)


def _truncated(inputs: LossInputs, keep: Tensor, clip_ratio_c: float | None) -> tuple[Tensor, Metrics]:
    if clip_ratio_c is not None and clip_ratio_c <= 1.0:
        raise UserError(f"clip_ratio_c bounds the importance ratio and must be greater than 1, got {clip_ratio_c}")
    log_ratio = inputs.log_ratio()
    ratio = log_ratio.detach().exp()
    weight = (ratio if clip_ratio_c is None else ratio.clamp(max=clip_ratio_c)) * keep
    metrics = {"pg_clipfrac": inputs.fraction(~keep), "ppo_kl": inputs.fraction(-log_ratio)}
    return inputs.aggregate(-inputs.advantages * weight * inputs.log_probs), metrics
