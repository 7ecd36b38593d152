"""Advantages by any estimator, by its name, and progress under another policy's value beside them (PAV)."""

from typing import Any

import torch
from torch import Tensor

from valor.algorithms.groups import GroupIds
from valor.algorithms.reductions import last_token, masked_whiten
from valor.algorithms.registry import ADVANTAGES
from valor.algorithms.turns import Turns
from valor.errors import UserError


def compute_advantages(
    name: str,
    *,
    rewards: Tensor,
    response_mask: Tensor,
    values: Tensor | None = None,
    group_ids: GroupIds | None = None,
    reward_baselines: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    sample_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] by the estimator `name`, without gradient.

    rewards, values [B, T]; response_mask [B, T], 1 where the policy produced the token; group_ids: one int or string
    per sample, equal for samples of one prompt; reward_baselines [B]: reward of the greedy response (remax).
    sample_mask [B]: samples with 0 take no part, neither in group nor in batch statistics, and come out 0; nor do
        those without any policy token, which rollout correction has rejected.
    options: the estimator's own keywords; an unknown one is a UserError that names the nearest.
    Estimators that know only outcomes (group_relative) return the same tensor twice.
    """
    entry = ADVANTAGES[name]
    if rewards.shape != response_mask.shape or rewards.ndim != 2:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and response_mask {tuple(response_mask.shape)} must be [B, T]"
        )
    if entry.capability.needs_critic and values is None:
        raise UserError(f"{name} needs the critic's values: pass values, or choose an estimator without a critic")
    if entry.capability.needs_greedy_baseline and reward_baselines is None:
        raise UserError(f"{name} needs reward_baselines: the reward of a greedy response to each prompt")
    common: dict[str, Any] = {"rewards": rewards, "response_mask": response_mask, "values": values, "gamma": gamma}
    common |= {"lam": lam, "group_ids": group_ids, "reward_baselines": reward_baselines}
    with torch.no_grad():
        takes_part = (response_mask != 0).any(1)
        if sample_mask is not None:
            takes_part &= sample_mask.bool()
        if bool(takes_part.all()):
            return entry.call(common, options)
        keep = torch.nonzero(takes_part).squeeze(1)
        if not len(keep):
            return torch.zeros_like(rewards), torch.zeros_like(rewards)
        if group_ids is not None and not isinstance(group_ids, Tensor):
            common["group_ids"] = [group_ids[row] for row in keep.tolist()]
        parts = entry.call(_of_samples(common, keep, len(rewards)), _of_samples(options, keep, len(rewards)))
        advantages, returns = (torch.zeros_like(rewards).index_copy_(0, keep, part) for part in parts)
        return advantages, returns


def _of_samples(value: Any, keep: Tensor, size: int) -> Any:
    """Selects rows `keep` of tensors whose first dimension is `size`."""
    if isinstance(value, dict):
        return {key: _of_samples(item, keep, size) for key, item in value.items()}
    by_sample = isinstance(value, Tensor) and value.ndim > 0 and len(value) == size
    return value[keep.to(value.device)] if by_sample else value


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
