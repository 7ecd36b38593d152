"""The rollout engine has the actor's weights before it generates, wherever it lives."""

from __future__ import annotations

from functools import partial

from valor.controller import Pools, Roles
from valor.trainer.side_by_side import side_by_side


class RolloutWeights:
    """Brings the rollout of `group` up to date: by a call where it is beside the actor, else by a transfer between
    their pools."""

    def __init__(self, group: Roles) -> None:
        self._group = group
        self._version: int | None = None  # what was transferred last
        self._address: tuple[str, int] | None = None

    def update(self) -> None:
        """After it, `generate` uses the actor's present weights. RuntimeError when they did not arrive bit for bit."""
        group = self._group
        if not isinstance(group, Pools) or group.placement.pool_of("rollout") == group.placement.pool_of("actor"):
            group["rollout"].update_weights()
            return
        sender, rollout = group["actor"], group["rollout"]
        version = sender.version()
        if version == self._version:
            return
        if self._address is None:
            self._address = sender.open_channel()
        receivers = group.placement.pools[group.placement.pool_of("rollout")].world_size
        transfer = {"actor": partial(sender.send_weights, receivers)}
        transfer["rollout"] = partial(rollout.receive_weights, self._address, version)
        side_by_side(group, list(transfer.items()))
        self._version = version
