"""All roles in this very process: no copies, no serialisation, a debugger's breakpoints just work."""

from __future__ import annotations

from typing import Any

from valor.controller.group import Call, Sink, WorkerGroup
from valor.controller.placement import ResourcePool
from valor.workers.host import RoleSpec, WorkerHost


class LocalGroup(WorkerGroup):
    """A group of one rank."""

    def __init__(self, pool: ResourcePool, specs: dict[str, RoleSpec]) -> None:
        super().__init__(pool, specs)
        assert pool.world_size == 1
        self._host = WorkerHost(0, 1, pool.device, pool.num_threads, deterministic=pool.deterministic)
        self._host.connect()
        self._host.build(specs)

    def run(self, role: str, method: str, calls: list[Call], sink: Sink | None = None) -> list[Any]:
        ((args, kwargs),) = calls
        return [self._host.call(role, method, *args, **kwargs, **({} if sink is None else {"sink": sink}))]

    def close(self) -> None:
        self._host.close()
