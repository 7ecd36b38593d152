"""The run's value function: one critic, or an ensemble whose members are roles of their own."""

from __future__ import annotations

import torch

from valor.config import PPOConfig
from valor.controller import Roles
from valor.data.batch import Batch
from valor.trainer.batch_metrics import mean_of
from valor.trainer.updates import Updates


def critic_names(config: PPOConfig) -> list[str]:
    """The critic's roles: none, `critic`, or `critic`, `critic_2`, … for an ensemble."""
    if not config.critic.enable:
        return []
    return ["critic", *(f"critic_{member}" for member in range(2, config.critic.ensemble_size + 1))]


class Critics:
    """Evaluates and trains the critic's roles.

    An ensemble (https://arxiv.org/abs/1602.04621 without its resampling) has one value, by which advantages are
    computed; its members learn the same returns from heads and mini-batch orders of their own, each clipped around its
    own old values.
    """

    def __init__(self, config: PPOConfig, group: Roles, updates: Updates) -> None:
        self.config, self.group, self.updates = config.critic, group, updates
        self.names = critic_names(config)

    def evaluate(self, batch: Batch, *, with_end: bool = False) -> tuple[Batch, dict[str, float]]:
        """`values` [B, T] (with_end: and `bootstrap_values` [B]) of the ensemble, each member's as `values/<role>`.

        Metric: `critic/ensemble_std`, the members' standard deviation, mean over policy tokens.
        """
        parts = [self.group[name].compute_values(batch, with_end=with_end) for name in self.names]
        if len(parts) == 1:
            return parts[0], {}
        every = {column: torch.stack([part[column] for part in parts]) for column in parts[0].tensors}
        out = {column: _reduced(values, self.config.ensemble_reduce) for column, values in every.items()}
        out |= {f"values/{name}": part["values"] for name, part in zip(self.names, parts, strict=True)}
        on = batch["response_mask"]
        spread = (every["values"].std(0) * on).sum() / on.sum().clamp(min=1.0)
        return Batch(out), {"critic/ensemble_std": float(spread)}

    def train(self, batch: Batch, step: int) -> dict[str, float]:
        """One step's updates of every member; metrics are means over them. Nothing in a frozen step."""
        frozen = self.config.frozen_at(step)
        parts = []
        for place, name in enumerate(self.names if not frozen else ()):
            own = f"values/{name}"
            rows = batch.union(Batch({"values": batch[own]})) if own in batch else batch
            parts.append(self.updates.run("critic", rows, step, member=place))
        return mean_of(parts) | {"critic/frozen": float(frozen)}


def _reduced(values: torch.Tensor, how: str) -> torch.Tensor:
    return values.mean(0) if how == "mean" else values.amin(0)
