"""One process of a worker group: a rank, its device, and the roles that live together in it.

Roles in one host may use each other (the native rollout engine shares the actor's weights), so they are built in the
given order and each receives the ones built before it.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from valor.config.engine import GlobalProfilerConfig
from valor.engines import distributed
from valor.workers.memory import (
    PeakMemory,
    keep_freed_memory,
    return_freed_memory,
    use_deterministic_algorithms,
    use_expandable_segments,
)

HOST = "host"  # the name under which the process itself is called
_TRACING = threading.Lock()  # torch has one profiler in a process


@dataclass(frozen=True)
class RoleSpec:
    """What to build: the role's class and its constructor's keyword arguments (picklable: they travel to the ranks).

    `replaceable`: it does not learn, so one that died can be built again, and be sent its weights again.
    """

    cls: type
    kwargs: dict[str, Any]
    replaceable: bool = False


@dataclass(frozen=True)
class RunFacts:
    """What the roles of a PPO run are built from besides the configuration.

    `learning_steps`: in how many steps the role learns. `separator_id`: the token between the texts of a pair, for a
    reward model that reads pairs.
    """

    learning_steps: int
    eos_token_ids: list[int]
    separator_id: int | None = None


@dataclass
class WorkerContext:
    """What a role may know about where it runs."""

    rank: int
    world_size: int
    device: torch.device
    address: str | None = None  # of rank 0's node, under Ray
    roles: dict[str, Any] = field(default_factory=dict)
    resident: list[Any] = field(default_factory=list)  # ModelRoles on the device, where they stay until room is needed

    def make_room(self, besides: Any = None) -> None:
        """Offload idle roles except `besides`."""
        for role in list(self.resident):
            if role is not besides:
                role.leave_device()


@dataclass
class Tracer:
    """Writes torch's traces of a step's calls to `folder`, as `settings` say."""

    folder: Path
    settings: GlobalProfilerConfig
    _calls: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def __call__(self, role: str, method: str, rank: int) -> Iterator[None]:
        """Trace the block, if its role is traced on this rank; members of an ensemble are as the critic.

        A call beside one that is being traced is not.
        """
        name, ranks = "critic" if role.startswith("critic_") else role, self.settings.ranks
        traced = name in self.settings.roles and (rank in ranks or not ranks)
        if not traced or not _TRACING.acquire(blocking=False):
            yield
            return
        contents = self.settings.contents
        try:
            cuda = [ProfilerActivity.CUDA] if "cuda" in contents and torch.cuda.is_available() else []
            with profile(
                activities=[ProfilerActivity.CPU, *cuda],
                record_shapes="shapes" in contents,
                profile_memory="memory" in contents,
                with_stack="stack" in contents,
            ) as trace:
                yield
        finally:
            _TRACING.release()
        call = f"{role}.{method}"
        self._calls[call] += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(self.folder / f"rank{rank}.{call}.{self._calls[call]}.json.gz"))


class WorkerHost:
    """Builds the roles of one rank and calls their methods by name.

    deterministic: only algorithms that give the same bits every time, where torch has them. gpu: number of its device.
    """

    def __init__(
        self, rank: int, world_size: int, device: str, num_threads: int, *, deterministic: bool = False, gpu: int = 0
    ) -> None:
        use_expandable_segments()
        if device == "cpu":
            keep_freed_memory()
        if deterministic:
            use_deterministic_algorithms()
        torch.set_num_threads(num_threads)
        self._device, self._gpu = device, gpu
        self._rank, self._world_size = rank, world_size
        self._tracer: Tracer | None = None

    def connect(self, address: str | None = None, port: int | None = None) -> None:
        """Join the process group whose rank 0 listens at address:port; a group of one needs neither."""
        device = distributed.init_process_group(
            self._device, rank=self._rank, world_size=self._world_size, address=address, port=port, gpu=self._gpu
        )
        self.context = WorkerContext(self._rank, self._world_size, device, address)
        self._memory = PeakMemory(device)

    def build(self, specs: dict[str, RoleSpec]) -> None:
        """Construct each role; a role sees the earlier ones in `context.roles`."""
        for name, spec in specs.items():
            self.context.roles[name] = spec.cls(self.context, **spec.kwargs)

    def layout(self) -> dict[str, int]:
        """Of each role the data-parallel rank: ranks that have the same one are given the same rows."""
        return {name: getattr(role, "data_parallel_rank", self._rank) for name, role in self.context.roles.items()}

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run `method` of `role` here."""
        if role == HOST:
            return getattr(self, method)(*args, **kwargs)
        if self.context.device.type == "cuda":
            torch.cuda.set_device(self.context.device)  # which is a thread's own setting
        function = getattr(self.context.roles[role], method)
        with ExitStack() as measured:
            if not function.valor_dispatch.light:
                if self.context.device.type == "cpu":
                    return_freed_memory()
                measured.enter_context(self._memory(f"{role}.{method}"))
                if self._tracer is not None:
                    measured.enter_context(self._tracer(role, method, self._rank))
            return function(*args, **kwargs)

    def trace(self, tracer: Tracer | None) -> None:
        """Trace the calls from now on with this one; None: no more."""
        self._tracer = tracer

    def peak_memory(self) -> dict[str, float]:
        """Metrics of the calls since the last time."""
        return self._memory.take()

    def close(self) -> None:
        """End what roles have started, drop the models, leave the process group."""
        for role in self.context.roles.values():
            if hasattr(role, "close"):
                role.close()
        self.context.roles.clear()
        distributed.leave_process_group()
