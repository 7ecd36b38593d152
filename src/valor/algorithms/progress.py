"""Progress under another policy's value, beside the advantages of an estimator (PAV)."""

from typing import Any

import torch
from torch import Tensor

from valor.algorithms.advantages import compute_advantages
from valor.algorithms.reductions import last_token, masked_whiten
from valor.algorithms.registry import ADVANTAGES
from valor.algorithms.turns import Turns


def progress(values: Tensor, step_ids: Tensor, response_mask: Tensor) -> Tensor:
    """A^μ(s, a) = V^μ(s') − V^μ(s) of the step that a token belongs to; all [B, T], 0 where the mask is.

    Setlur et al. 2024, https://arxiv.org/abs/2410.08146: s is the state before the step, s' the one after it, and
    Q^μ(s, a) = V^μ(s'), since nothing but the step's own tokens leads from one to the other. values: V^μ of the state
    before each token, of a prover μ; step_ids: number of each policy token's step, from 1, rising. The last step ends
    with the value at the last policy token, the last one that a critic was trained to give: a step of one token that
    ends a response has 0.
    """
    steps = Turns(step_ids, response_mask)
    before = steps.first(values)
    after = torch.cat([before[:, 1:], torch.zeros_like(before[:, :1])], 1)
    last = (steps.present.sum(1).long() - 1).clamp(min=0).unsqueeze(1)
    after = after.scatter(1, last, values.gather(1, last_token(response_mask).unsqueeze(1)))
    return steps.spread(after - before)


def advantages_with_progress(
    name: str, *, progress: Tensor, response_mask: Tensor, whitening: str = "batch", **inputs: Any
) -> tuple[Tensor, Tensor]:
    """Advantages plus `progress` [B, T], and the estimator's returns. Whitening, where the estimator has it, is of the
    sum; one that scales its advantages itself (grpo) has the progress added after that. Other inputs as in
    `compute_advantages`.

    Beside the advantage, not in the reward: Σ of the later steps' progress is V^μ(end) − V^μ(s'), so that a reward of
    it would tell a token that the prover's value has been reached and not that it has risen (docs/critic.md).
    """
    whitens = "whitening" in ADVANTAGES[name].options
    if whitens:
        inputs["whitening"] = "none"
    advantages, returns = compute_advantages(name, response_mask=response_mask, **inputs)
    advantages = advantages + progress
    return masked_whiten(advantages, response_mask, scope=whitening) if whitens else advantages, returns
