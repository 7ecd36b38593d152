"""Value targets and advantages of the present policy from samples of another one: V-trace."""

from torch import Tensor

from valor.algorithms.gae import add_end_values, token_gae
from valor.algorithms.ppo import LOG_RATIO_BOUND
from valor.algorithms.reductions import keep_masked, log_ratio, masked_whiten
from valor.algorithms.registry import register_advantage
from valor.algorithms.scan import at_next_token, credit_policy_tokens, suffix_scan
from valor.errors import UserError


@register_advantage("vtrace", needs_critic=True)
def vtrace(
    *,
    rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    lam_actor: float | None = None,
    lam_critic: float | None = None,
    rho_bar: float = 5.0,
    c_bar: float = 1.0,
    bootstrap_mask: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    whitening: str = "batch",
    reward_on_masked: str = "carry",
) -> tuple[Tensor, Tensor]:
    """GAE whose returns are of the policy that trains, where an older one has sampled: D_t = ρ_t δ_t + b_t D_{t'},
    b_t = min(1, γλ c_t), return_t = V_t + D_t, A_t = δ_t + γλ D_{t'} (V-trace, https://arxiv.org/abs/1802.01561, with
    the λ of its remark 2).

    δ_t = r_t + γ V_{t'} − V_t, t' the next policy token; ρ_t = min(rho_bar, e^x) and c_t = min(c_bar, e^x), with
    x = old_log_probs − rollout_log_probs [B, T], |x| ≤ 20. rho_bar, c_bar: at least 1. Other inputs as in `gae`, to
    which all of this comes down, bit for bit, where both log-probs are the same.
    A return estimates the value of the state before token t, so it weighs token t. An advantage estimates what token t
    itself is worth, so it does not: the weights of the policy loss do (`rollout_is`).
    Where no ratio exceeds rho_bar, the critic's fixed point is V of the policy that trains, for any c_bar; otherwise it
    is V of a policy between the two. With the paper's c_bar of 1 the bound of b_t does nothing. A larger one makes up
    for γλ < 1 where a ratio is above 1; without the bound the product of c_t grows exponentially with the length.
    """
    actor_lambda, critic_lambda = (lam if special is None else special for special in (lam_actor, lam_critic))
    if not all(0.0 <= share <= 1.0 for share in (gamma, actor_lambda, critic_lambda)):
        raise UserError("gamma and lam must be between 0 and 1")
    if not (rho_bar >= 1.0 and c_bar >= 1.0):
        raise UserError(f"rho_bar and c_bar of vtrace must be at least 1, got {rho_bar:g} and {c_bar:g}")
    mask = response_mask.to(values.dtype)
    reward = credit_policy_tokens(rewards.to(values.dtype), mask, reward_on_masked)
    end = None if bootstrap_mask is None else (bootstrap_mask, bootstrap_values)
    x = keep_masked(log_ratio(old_log_probs, rollout_log_probs), mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if not bool(x.any()):
        advantages, returns = token_gae(reward, values, mask, gamma, (actor_lambda, critic_lambda), end)
        return masked_whiten(advantages, mask, scope=whitening), returns
    value, ratio = keep_masked(values, mask), x.exp()
    if end is not None:
        reward = add_end_values(reward, value, mask, *end, gamma)
    delta = reward + gamma * at_next_token(value, mask) - value
    weighted, traces = ratio.clamp(max=rho_bar) * delta, ratio.clamp(max=c_bar)
    for_actor, for_critic = (
        suffix_scan(weighted, (gamma * lam * traces).clamp(max=1.0), mask) for lam in (actor_lambda, critic_lambda)
    )
    advantages = delta + gamma * actor_lambda * at_next_token(for_actor, mask)
    return masked_whiten(advantages, mask, scope=whitening), for_critic + value
