"""Policy losses of the form −weight · A · log π: only their gradient means something, not their value."""

from torch import Tensor

from valor.algorithms.ppo import LossInputs, Metrics, clip_bounds
from valor.algorithms.reductions import Denominator, aggregate_loss
from valor.algorithms.registry import register_policy_loss
from valor.errors import UserError


@register_policy_loss("gpg", paper="https://arxiv.org/abs/2504.02546")
@register_policy_loss("reinforce", paper="https://doi.org/10.1007/BF00992696")
def reinforce(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """L = −A log π (times the rollout's importance weights where given): REINFORCE. Metrics: ppo_kl.

    Williams 1992, https://doi.org/10.1007/BF00992696; also the plain objective of GPG (https://arxiv.org/abs/2504.02546),
    whose estimator does the rest.
    """
    return inputs.aggregate(-inputs.advantages * inputs.log_probs), {"ppo_kl": inputs.fraction(-inputs.log_ratio())}


@register_policy_loss("cispo")
def cispo(inputs: LossInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> tuple[Tensor, Metrics]:
    """L = −sg(clip(ρ, 1−low, 1+high)) A log π: clips the weight, keeps every token's gradient
    (CISPO, https://arxiv.org/abs/2506.13585). Metrics: pg_clipfrac (tokens whose weight is clipped), ppo_kl.
    """
    low, high = clip_bounds(clip_ratio_low, clip_ratio_high)
    log_ratio = inputs.log_ratio()
    ratio = log_ratio.exp().detach()
    weight = ratio.clamp(low, high)
    metrics = {"pg_clipfrac": inputs.fraction(weight != ratio), "ppo_kl": inputs.fraction(-log_ratio)}
    return inputs.aggregate(-weight * inputs.advantages * inputs.log_probs), metrics


@register_policy_loss("dro")
def dro(inputs: LossInputs, *, dro_beta: float | None = None) -> tuple[Tensor, Metrics]:
    """L = −(A log π − β/2 · (log π/π_old)²): direct reward optimisation with a quadratic leash, β = dro_beta > 0
    (https://arxiv.org/abs/2405.19107). Metrics: ppo_kl, dro_penalty (mean of the second term).
    """
    if dro_beta is None or dro_beta <= 0:
        raise UserError(f"dro needs dro_beta > 0, got {dro_beta}: it is all that keeps the policy near the old one")
    log_ratio = inputs.log_ratio()
    penalty = 0.5 * dro_beta * log_ratio.square()
    metrics = {"ppo_kl": inputs.fraction(-log_ratio), "dro_penalty": inputs.fraction(penalty)}
    return inputs.aggregate(penalty - inputs.advantages * inputs.log_probs), metrics


@register_policy_loss("sapo", aggregation="seq-mean-token-mean")
def sapo(inputs: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> tuple[Tensor, Metrics]:
    """L = −A · 4/τ · σ(τ(ρ − 1)), τ = tau_pos where A > 0, else tau_neg: a soft gate instead of a clip
    (SAPO, https://arxiv.org/abs/2511.20347). Aggregated as seq-mean-token-mean. Metrics: ppo_kl.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise UserError("sapo needs tau_pos > 0 and tau_neg > 0")
    log_ratio = inputs.log_ratio()
    positive = (inputs.advantages > 0).to(log_ratio.dtype)
    tau = tau_pos * positive + tau_neg * (1.0 - positive)
    gate = (tau * (log_ratio.exp() - 1.0)).sigmoid() * 4.0 / tau
    return inputs.aggregate(-gate * inputs.advantages), {"ppo_kl": inputs.fraction(-log_ratio)}


def positive_nll(
    log_probs: Tensor, response_mask: Tensor, positive: Tensor, num_positive_tokens: Denominator = None
) -> Tensor:
    """−Σ log π over the policy tokens of right answers / their number: imitation of what was right (VAPO,
    https://arxiv.org/abs/2504.05118); 0 where nothing was.

    log_probs, response_mask [B, T]; positive [B]; num_positive_tokens: that of the whole mini-batch if this is a part.
    """
    return aggregate_loss(-log_probs, response_mask * positive.unsqueeze(1), denominator=num_positive_tokens)
