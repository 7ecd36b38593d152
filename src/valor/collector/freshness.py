"""The one place that asks whether the rollout engine has the actor's present weights."""

from bisect import bisect_right
from collections.abc import Callable

import torch
from torch import Tensor

from valor.controller.group import Pools
from valor.errors import TrainingStopped


class WeightPublisher:
    """Gives the rollout the actor's weights when it has others: by a call where it is beside the actor, else by a
    transfer between their pools.

    versions: those that the rollout was given, ascending (of asynchronous runs alone).
    """

    def __init__(self, roles: Pools) -> None:
        self._roles = roles
        self._address: tuple[str, int] | None = None
        self._replacements = 0  # of the rollout's processes, when the channel was opened
        self.versions: list[int] = []

    def publish(self) -> None:
        """After it, `generate` uses the actor's present weights, unless its engine keeps its own on purpose.

        RuntimeError when they did not arrive bit for bit. WorkersReplaced: the rollout died, and is to be asked again.
        """
        roles = self._roles
        actor, rollout = roles["actor"], roles["rollout"]
        version = actor.version()
        self._note(version)
        if not rollout.needs_weights(version):
            return
        if rollout.group is actor.group:
            rollout.update_weights()
            return
        address, receivers = self._channel()
        sent = roles.submit("actor", actor.send_weights, receivers)
        received = roles.submit("rollout", rollout.receive_weights, address, version)
        errors = received.exception(), sent.exception()
        deaths = [error for error in errors if isinstance(error, TrainingStopped)]
        if error := next(iter(deaths), errors[0] or errors[1]):  # who is left complains of the one that died
            raise error

    def publish_beside(self, tell: Callable[[tuple[str, int], int], None]) -> None:
        """The same while the rollout generates: `tell(address, version)` has it take the weights between two tokens."""
        roles = self._roles
        actor = roles["actor"]
        version = actor.version()
        if self.versions and self.versions[-1] == version:
            return
        address, receivers = self._channel()
        tell(address, version)
        roles.submit("actor", actor.send_weights, receivers).result()
        self._note(version)

    @property
    def version(self) -> int:
        """Number of the newest transfer, from 0; ages are differences of such numbers."""
        return len(self.versions) - 1

    def number(self, weights_version: int) -> int:
        """Number of the transfer that brought the weights after so many updates."""
        return max(0, bisect_right(self.versions, weights_version) - 1)

    def ages(self, weights_versions: Tensor) -> Tensor:
        """Of tokens that weights of these versions have sampled, the age in transfers."""
        known = torch.tensor(self.versions)
        return self.version - (torch.searchsorted(known, weights_versions, right=True) - 1).clamp(min=0)

    def _note(self, version: int) -> None:
        if not self.versions or self.versions[-1] != version:
            self.versions.append(version)

    def _channel(self) -> tuple[tuple[str, int], int]:
        """Where sender and receivers meet, and how many receivers there are."""
        group = self._roles["rollout"].group
        if self._address is None or self._replacements != group.num_replacements:  # new ones know no old channel
            self._address, self._replacements = self._roles["actor"].open_channel(), group.num_replacements
        assert self._address is not None
        return self._address, group.pool.world_size
