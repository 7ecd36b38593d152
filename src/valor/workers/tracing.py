"""Traces by torch's profiler, one for each call of a role in the steps that are to be traced."""

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from valor.config.engine import ProfilerConfig


@dataclass
class Tracer:
    """Writes the traces of one step into `folder`, with `contents` (cpu, cuda, memory, shapes, stack) in them.

    `roles`: the settings of those that are traced.
    """

    folder: Path
    contents: Collection[str]
    roles: Mapping[str, ProfilerConfig]
    _calls: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def __call__(self, role: str, method: str, rank: int) -> Iterator[None]:
        """Trace the block, if its role is traced on this rank; members of an ensemble are as the critic.

        A call beside one that is being traced is not: torch has one profiler in a process.
        """
        settings = self.roles.get("critic" if role.startswith("critic_") else role)
        if settings is None or not settings.traces(rank) or not _FREE.acquire(blocking=False):
            yield
            return
        try:
            cuda = [ProfilerActivity.CUDA] if "cuda" in self.contents and torch.cuda.is_available() else []
            with profile(
                activities=[ProfilerActivity.CPU, *cuda],
                record_shapes="shapes" in self.contents,
                profile_memory="memory" in self.contents,
                with_stack="stack" in self.contents,
            ) as recorded:
                yield
        finally:
            _FREE.release()
        call = f"{role}.{method}"
        self._calls[call] += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self.folder / f"rank{rank}.{call}.{self._calls[call]}.json.gz"))


_FREE = threading.Lock()
