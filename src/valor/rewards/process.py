"""One grader process, as the process that has started it sees it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from valor.rewards.worker import RewardResult, WorkerSetup, serve


@dataclass(eq=False)
class Job:
    """A sample and the future of its result."""

    sample: bytes  # pickled here: one that cannot be is nobody else's trouble
    computes: bool = False
    future: Future[Any] = field(default_factory=Future)


class GraderProcess:
    """Grades one chunk of samples after another; it is `ready` when it has said so, and busy while it has `jobs`.

    Before each sample it notes the sample's place in the chunk, in memory that it shares with this process: so it is
    known whose grader is running, and for how long.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        context = _GraderContext()
        context.set_forkserver_preload([__name__])  # with all that a process needs: it starts at once
        self.ready = False
        self.jobs: list[Job] = []
        self._note = context.RawValue("i", -1)
        self._seen, self._since = -1, time.monotonic()
        self.channel, theirs = context.Pipe()
        self._process: Any = context.Process(target=serve, args=(setup, self._note, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, jobs: Sequence[Job]) -> None:
        """Have these graded."""
        self.jobs = list(jobs)
        self._note.value = self._seen = -1
        self._since = time.monotonic()
        with suppress(OSError):  # it has died; `receive` will say so
            self.channel.send([job.sample for job in jobs])

    def receive(self) -> list[RewardResult] | None:
        """Results of the first of its jobs, none when it has just become ready; None when it has died."""
        try:
            return self.channel.recv()
        except (EOFError, OSError):
            return None

    def under_way(self) -> tuple[int, float]:
        """Place in the chunk of the sample that it has begun last (-1: none yet), and for how long that is so (s)."""
        now = time.monotonic()
        if self._note.value != self._seen:
            self._seen, self._since = self._note.value, now
        return self._seen, now - self._since

    def computes(self) -> bool:
        """Whether it has a processor or waits for one; True where the system does not say."""
        try:
            return Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"
        except OSError:
            return True

    def end(self) -> int:
        """Kill it, if it still runs. Returns the exit status, or minus the signal that ended it."""
        self._process.kill()
        self._process.join()
        self.channel.close()
        return self._process.exitcode


class _GraderProcess(ForkServerProcess):
    """A process that does not import the parent's main module.

    Python would run it again in every child: seconds and hundreds of megabytes when it imports torch or ray, and an
    endless recursion when it is a script without a `__main__` guard. Graders are found by FunctionSource instead.
    """

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _nameless_main():
            return ForkServerProcess._Popen(process_obj)  # type: ignore[attr-defined]


class _GraderContext(ForkServerContext):
    """Forks from a clean server process: the parent's threads, locks and sockets are not the graders'."""

    Process = _GraderProcess  # type: ignore[assignment]


_one_at_a_time = threading.Lock()  # executors start processes in threads of their own


@contextmanager
def _nameless_main() -> Iterator[None]:
    with _one_at_a_time:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # no __spec__, no __file__: nothing for the child to import
        try:
            yield
        finally:
            sys.modules["__main__"] = main
