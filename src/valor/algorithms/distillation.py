"""How far a policy π is from its teacher ν at a token: estimates from the sampled token, and exact divergences.

On-policy distillation: https://arxiv.org/abs/2306.13649 (GKD), https://thinkingmachines.ai/blog/on-policy-distillation.
"""

import math

import torch
from torch import Tensor

from valor.algorithms.kl import kl_penalty
from valor.algorithms.reductions import LOWEST_LOG_PROB
from valor.algorithms.registry import choose

DIVERGENCES: tuple[str, ...] = ("forward_kl", "reverse_kl", "jsd")


def sampled_divergence(
    log_probs: Tensor,
    teacher_log_probs: Tensor,
    kind: str,
    *,
    log_prob_min: float | None = None,
    limit: float | None = None,
) -> Tensor:
    """Per-token estimate of KL(π ‖ ν) from the sampled token, same shape as the inputs; kinds of `kl_penalty`.

    As a loss k1 has a gradient of mean 0, which does not depend on the teacher; as a signal of the policy gradient,
    −k1 = log ν − log π is the advantage whose expected gradient is that of −KL(π ‖ ν) at this token.
    log_prob_min: lower log-probs count as this one. limit: the largest size of the result.
    """
    if log_prob_min is not None:
        log_probs, teacher_log_probs = log_probs.clamp(min=log_prob_min), teacher_log_probs.clamp(min=log_prob_min)
    estimate = kl_penalty(log_probs, teacher_log_probs, kind)
    return estimate if limit is None else estimate.clamp(-limit, limit)


def divergence(
    log_probs: Tensor,
    teacher_log_probs: Tensor,
    kind: str,
    *,
    beta: float = 0.5,
    topk: int | None = None,
    add_tail: bool = True,
    log_prob_min: float | None = None,
    limit: float | None = None,
) -> Tensor:
    """Divergence [...] of two distributions over a vocabulary, log-probs [..., V], with a gradient in both.

    forward_kl  KL(ν ‖ π) = Σ ν (log ν − log π), which covers the teacher
    reverse_kl  KL(π ‖ ν) = Σ π (log π − log ν), which seeks its modes
    jsd         β KL(ν ‖ m) + (1 − β) KL(π ‖ m), m = (1 − β) π + β ν (generalized Jensen-Shannon, as in GKD); at β = 0
                forward_kl, at β = 1 reverse_kl: its limits divided by β and by 1 − β

    topk: over the k tokens that ν finds likeliest. add_tail: the remaining mass of each distribution is one more token,
    a lower bound of the divergence over the vocabulary; else it is left out, and what comes out below 0 is 0 (verl).
    log_prob_min: lower log-probs count as this one. limit: the largest size of the result.
    """
    choose(kind, DIVERGENCES, "divergence")
    p, q = log_probs.clamp(min=LOWEST_LOG_PROB), teacher_log_probs.clamp(min=LOWEST_LOG_PROB)
    if topk is not None:
        likeliest = q.detach().topk(min(topk, q.shape[-1]), dim=-1).indices
        p, q = (_of_tokens(x, likeliest, add_tail) for x in (p, q))
    if log_prob_min is not None:
        p, q = p.clamp(min=log_prob_min), q.clamp(min=log_prob_min)
    if kind == "jsd" and 0.0 < beta < 1.0:
        mixture = torch.logaddexp(p + math.log1p(-beta), q + math.log(beta))
        terms = beta * q.exp() * (q - mixture) + (1.0 - beta) * p.exp() * (p - mixture)
    elif kind == "reverse_kl" or (kind == "jsd" and beta == 1.0):
        terms = p.exp() * (p - q)
    else:
        terms = q.exp() * (q - p)
    total = terms.sum(-1)
    if topk is not None and not add_tail:
        total = total.clamp(min=0.0)
    return total if limit is None else total.clamp(-limit, limit)


def _of_tokens(log_probs: Tensor, tokens: Tensor, add_tail: bool) -> Tensor:
    """The log-probs of `tokens` [..., K]; with add_tail also that of all others together, [..., K + 1]."""
    some = log_probs.gather(-1, tokens)
    if not add_tail:
        return some
    rest = log_probs.scatter(-1, tokens, LOWEST_LOG_PROB).logsumexp(-1, keepdim=True)
    return torch.cat([some, rest], dim=-1)
