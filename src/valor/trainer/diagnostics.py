"""What a step shows of the critic: how values, returns and advantages are spread, and where the values are wrong."""

from __future__ import annotations

import torch

from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.tracking.histogram import Histogram, histogram

_SPREAD = ("values", "returns", "advantages")
NUM_PARTS = 5


def diagnostics(batch: Batch, config: PPOConfig) -> dict[str, float | Histogram]:
    """`critic/<quantity>/histogram` over policy tokens; with a critic also `critic/vf_abs_error/fifth_k`, mean |V - R|
    in the k-th fifth of each response's policy tokens, and `reward/from_critic`, whether the reward is its value."""
    mask = batch["response_mask"]
    out: dict[str, float | Histogram] = {}
    for name in _SPREAD:
        if name in batch and (found := histogram(batch[name], mask)) is not None:
            out[f"critic/{name}/histogram"] = found
    if "values" in batch:
        out["reward/from_critic"] = float(config.algorithm.reward_source == "critic")
        error = (batch["values"] - batch["returns"]).abs()
        part = _part(mask)
        for k in range(NUM_PARTS):
            here = (part == k) & (mask != 0)
            if here.any():
                out[f"critic/vf_abs_error/fifth_{k + 1}"] = float(error[here].mean())
    return out


def _part(mask: torch.Tensor) -> torch.Tensor:
    """[B, T] which of NUM_PARTS equal parts of its row's policy tokens a policy token is in, from 0."""
    place = mask.cumsum(1) - 1
    return (place * NUM_PARTS / mask.sum(1, keepdim=True).clamp(min=1.0)).floor().long()
