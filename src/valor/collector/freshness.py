"""The one place that asks whether the rollout engine has the actor's present weights."""

from __future__ import annotations

from valor.controller.group import Pools, Roles
from valor.errors import TrainingStopped


class WeightPublisher:
    """Gives the rollout the actor's weights when it has others: by a call where it is beside the actor, else by a
    transfer between their pools."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self._address: tuple[str, int] | None = None
        self._replacements = 0  # of the rollout's processes, when the channel was opened

    def publish(self) -> None:
        """After it, `generate` uses the actor's present weights, unless its engine keeps its own on purpose.

        RuntimeError when they did not arrive bit for bit. WorkersReplaced: the rollout died, and is to be asked again.
        """
        roles = self._roles
        actor, rollout = roles["actor"], roles["rollout"]
        version = actor.version()
        if not rollout.needs_weights(version):
            return
        if not isinstance(roles, Pools) or roles.placement.pool_of("rollout") == roles.placement.pool_of("actor"):
            rollout.update_weights()
            return
        replacements = roles.num_replacements("rollout")
        if self._address is None or self._replacements != replacements:  # new processes know no old channel
            self._address, self._replacements = actor.open_channel(), replacements
        receivers = roles.placement.pools[roles.placement.pool_of("rollout")].world_size
        sent = roles.submit("actor", actor.send_weights, receivers)
        received = roles.submit("rollout", rollout.receive_weights, self._address, version)
        errors = received.exception(), sent.exception()
        deaths = [error for error in errors if isinstance(error, TrainingStopped)]
        if error := next(iter(deaths), errors[0] or errors[1]):  # who is left complains of the one that died
            raise error
