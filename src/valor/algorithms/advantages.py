"""Advantages by any estimator, by its name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from valor.algorithms.groups import GroupIds
from valor.algorithms.registry import ADVANTAGES
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
    sample_mask [B]: samples with 0 take no part, neither in group nor in batch statistics, and come out 0.
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
    common: dict[str, Any] = {
        "rewards": rewards,
        "response_mask": response_mask,
        "values": values,
        "group_ids": group_ids,
        "reward_baselines": reward_baselines,
        "gamma": gamma,
        "lam": lam,
    }
    with torch.no_grad():
        if sample_mask is None:
            return entry.call(common, options)
        return _on_samples(entry.call, common, options, sample_mask)


def _on_samples(
    call: Callable[..., tuple[Tensor, Tensor]], common: dict[str, Any], options: dict[str, Any], sample_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs an estimator on the samples of sample_mask alone; the others get 0."""
    keep = torch.nonzero(sample_mask).squeeze(1)
    size = sample_mask.shape[0]

    def select(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == size:
            return value[keep.to(value.device)]
        if isinstance(value, dict):
            return {key: select(item) for key, item in value.items()}
        if hasattr(value, "__len__") and not isinstance(value, str) and len(value) == size:
            return [value[row] for row in keep.tolist()]
        return value

    chosen = {key: select(value) for key, value in common.items()}
    parts = call(chosen, {key: select(value) for key, value in options.items()})
    advantages, returns = (torch.zeros_like(common["rewards"]).index_copy_(0, keep, part) for part in parts)
    return advantages, returns
