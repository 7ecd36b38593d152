"""KL divergence to a reference policy: estimators, the exact one, the penalty in the reward, and its controller.

http://joschu.net/blog/kl-approx.html derives k1, k2 and k3.
"""

from torch import Tensor

from valor.algorithms.reductions import keep_masked, log_ratio, masked_mean
from valor.algorithms.registry import choose
from valor.errors import UserError

_ALIASES = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3", "k1": "k1", "k2": "k2", "k3": "k3"}
KL_KINDS: tuple[str, ...] = (*_ALIASES, *(f"{kind}+" for kind in _ALIASES))


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str = "low_var_kl") -> Tensor:
    """Per-token estimate of KL(π ‖ π_ref) from the sampled token, same shape as the inputs; x = log π − log π_ref.

    kl | k1        x, unbiased, high variance, may be negative
    abs            |x|
    mse | k2       x²/2, biased, whose gradient is that of the KL in expectation
    low_var_kl|k3  e^−x − 1 + x, unbiased, non-negative; |x| ≤ 20 and the result within ±10: outliers have no gradient
    "+"            the value of the estimator with the gradient of k2
    The exact divergence needs logits: `full_kl_from_logits`.
    """
    if kind == "full":
        raise UserError("kl kind 'full' needs whole distributions: use full_kl_from_logits on the logits")
    choose(kind, KL_KINDS, "kl kind")
    x = log_ratio(log_probs, ref_log_probs)
    value = _estimate(x, _ALIASES[kind.removesuffix("+")])
    if kind.endswith("+"):
        surrogate = _estimate(x, "k2")
        value = value.detach() + (surrogate - surrogate.detach())
    return value


def _estimate(x: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return x
    if kind == "abs":
        return x.abs()
    if kind == "k2":
        return 0.5 * x.square()
    reverse = (-x).clamp(-20.0, 20.0)
    return (reverse.exp() - reverse - 1.0).clamp(-10.0, 10.0)


def full_kl_from_logits(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(π ‖ π_ref) = Σ_v π_v (log π_v − log π_ref,v): the exact divergence that k1, k2 and k3 estimate.

    Logits [..., V]; result float32 [...].
    """
    log_probs, ref_log_probs = logits.float().log_softmax(-1), ref_logits.float().log_softmax(-1)
    return (log_probs.exp() * log_ratio(log_probs, ref_log_probs)).sum(-1)  # a token ruled out by −inf contributes 0


def subtract_divergence(
    token_level_scores: Tensor, divergence: Tensor, response_mask: Tensor, *, kl_coef: float
) -> tuple[Tensor, float]:
    """Rewards [B, T] = scores − kl_coef · divergence at policy tokens, and the current KL for the controller.

    divergence [B, T]: of `kl_penalty`, or the exact one. The current KL is the mean over sequences (those with a policy
    token) of their mean over tokens.
    """
    divergence = keep_masked(divergence, response_mask)
    per_row = masked_mean(divergence, response_mask, dim=-1)
    current = masked_mean(per_row, (response_mask != 0).any(-1))
    return token_level_scores - kl_coef * divergence, current.item()


class KLController:
    """The KL coefficient `value` of the reward penalty: a constant, or one that steers the KL to `target_kl`.

    β ← β · (1 + clip(KL/target − 1, ±0.2) · n_steps / horizon) (https://arxiv.org/abs/1909.08593, section 2.2).
    """

    def __init__(self, kl_coef: float, target_kl: float | None = None, horizon: float = 10000.0) -> None:
        self.value, self.target_kl, self.horizon = kl_coef, target_kl, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Called after each step with the mean KL of its `n_steps` sequences."""
        if self.target_kl is not None:
            error = min(max(current_kl / self.target_kl - 1.0, -0.2), 0.2)
            self.value *= 1.0 + error * n_steps / self.horizon
