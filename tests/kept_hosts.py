"""Processes of Ray groups that serve one run after the other: a new one takes seven seconds of imports to start."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import ray

from valor.controller.placement import ResourcePool
from valor.controller.ray_group import RayGroup

_KEPT = 2  # a run may have two pools of one shape


class KeptHosts:
    """Closed groups of each shape, taken by the next groups of that shape."""

    def __init__(self) -> None:
        self._free: defaultdict[ResourcePool, list[tuple[list[Any], Any]]] = defaultdict(list)
        self._place, self._close = RayGroup._place, RayGroup.close

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on groups take processes from here, and leave them here."""
        monkeypatch.setattr(RayGroup, "_place", lambda group: self.place(group))
        monkeypatch.setattr(RayGroup, "close", lambda group: self.close(group))

    def place(self, group: RayGroup) -> None:
        """In place of RayGroup._place."""
        if self._free[group.pool]:
            group._actors, group._placement = self._free[group.pool].pop()
        else:
            self._place(group)

    def close(self, group: RayGroup) -> None:
        """In place of RayGroup.close: the roles end and the process group is left, as in a local run."""
        if len(self._free[group.pool]) == _KEPT or not group._actors:
            self._close(group)
            return
        try:
            ray.get([actor.close.remote() for actor in group._actors], timeout=30)
        except (ray.exceptions.RayError, TimeoutError):  # one that is dead, or busy with a call that nobody waits for
            self._close(group)
        else:
            self._free[group.pool].append((group._actors, group._placement))
