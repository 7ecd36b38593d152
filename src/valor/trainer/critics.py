"""The run's value function: one critic, or an ensemble whose members are roles of their own."""

from __future__ import annotations

import torch

from valor.config import PPOConfig
from valor.controller.group import Roles
from valor.data.batch import Batch
from valor.trainer.step_metrics import mean_over_updates
from valor.trainer.updates import Updates
from valor.workers.roles import critic_names


class Critics:
    """Evaluates and trains the critic's roles.

    An ensemble (https://arxiv.org/abs/1602.04621 without its resampling) has one value, by which advantages are
    computed; its members learn the same returns from heads and mini-batch orders of their own, each clipped around its
    own old values.
    """

    def __init__(self, config: PPOConfig, roles: Roles, updates: Updates) -> None:
        self.config, self.roles, self.updates = config.critic, roles, updates
        self.names = critic_names(config)

    def compute_values(self, batch: Batch, *, with_end: bool = False) -> tuple[Batch, dict[str, float]]:
        """`values` [B, T] (with_end: and `bootstrap_values` [B]) of the ensemble, each member's as `values/<role>`.

        Metric: `critic/ensemble_std`, the members' standard deviation, mean over policy tokens.
        """
        parts = [self.roles[name].compute_values(batch, with_end=with_end) for name in self.names]
        if len(parts) == 1:
            return parts[0], {}
        stacked = {column: torch.stack([part[column] for part in parts]) for column in parts[0].tensors}
        mean = self.config.ensemble_reduce == "mean"
        out = {column: values.mean(0) if mean else values.amin(0) for column, values in stacked.items()}
        out |= {f"values/{name}": part["values"] for name, part in zip(self.names, parts, strict=True)}
        mask = batch["response_mask"]
        spread = (stacked["values"].std(0) * mask).sum() / mask.sum().clamp(min=1.0)
        return Batch(out), {"critic/ensemble_std": float(spread)}

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """One step's updates of every member; metrics are means over them. Nothing in a frozen step.

        Trains where `value_mask` is 1, or, without that column, at all policy tokens.
        """
        frozen = self.config.frozen_at(step)
        batch = batch.union(Batch({"response_mask": batch["value_mask"]})) if "value_mask" in batch else batch
        parts = []
        for member, name in enumerate(self.names if not frozen else ()):
            own = f"values/{name}"
            rows = batch.union(Batch({"values": batch[own]})) if own in batch else batch
            parts.append(self.updates.run("critic", rows, step, member=member))
        return mean_over_updates(parts) | {"critic/frozen": float(frozen)}
