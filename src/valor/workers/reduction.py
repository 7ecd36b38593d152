"""Metrics of one rank's rows as metrics of the whole mini-batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from valor.tracking.metrics import reduce_metrics


def sum_over_ranks(metrics: Mapping[str, float]) -> dict[str, float]:
    """Shares of all ranks put together, equal on all of them (collective; a rank without rows gives no shares)."""
    world_size = dist.get_world_size()
    if world_size == 1:
        return dict(metrics)
    parts: list[dict[str, float]] = [{}] * world_size
    dist.all_gather_object(parts, dict(metrics))
    return reduce_metrics(parts)
