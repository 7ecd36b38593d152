"""One set of grader processes: chunks of samples in, their results out, and word of who was at fault when one died."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any

from pebble import CONSTS, ProcessPool

from valor.rewards.worker import CHUNK_SECONDS, RewardResult, WorkerSetup, grade_chunk, start_worker

# A grader may have made itself deaf to SIGTERM; SIGKILL follows after this many seconds.
CONSTS.term_timeout = 0.2

_CHUNKS_PER_WORKER = 2  # one under way and one waiting, so that no process idles between two chunks


class PoolBrokenError(Exception):
    """This pool takes no more work; a new one has to be made."""


class GraderPool:
    """Processes that grade chunks, each chunk in a slot of its own while it is under way.

    Before each sample a process writes the sample's place in the chunk into the slot's note, in memory that it shares
    with this one: so it is known whose grader was running when a process had to be killed or died.
    """

    def __init__(self, setup: WorkerSetup, num_workers: int, timeout: float) -> None:
        self.timeout = timeout
        self.num_slots = num_workers * _CHUNKS_PER_WORKER
        self.free_slots = list(range(self.num_slots))
        self.proven = False  # it has finished a chunk: its processes can start
        context: Any = _GraderContext()
        context.set_forkserver_preload([start_worker.__module__])  # a process that takes another's place starts at once
        self._notes: MutableSequence[int] = context.RawArray("i", self.num_slots)
        self._processes = ProcessPool(
            num_workers, initializer=start_worker, initargs=(setup, self._notes), context=context
        )

    def start(self, slot: int, samples: Sequence[bytes], on_done: Callable[[Future[list[RewardResult]]], None]) -> None:
        """Grade a chunk of pickled samples; `on_done` is called in another thread. Raises PoolBrokenError."""
        self._notes[slot] = -1
        try:
            # A sample may begin just before the chunk's time is up.
            limit = self.timeout + CHUNK_SECONDS
            done = self._processes.schedule(grade_chunk, args=(slot, list(samples)), timeout=limit)
        except RuntimeError:
            raise PoolBrokenError from None
        done.add_done_callback(on_done)

    def under_way(self, slot: int) -> int | None:
        """Place in its chunk of the sample that was begun last, None before the first."""
        return None if self._notes[slot] < 0 else self._notes[slot]

    def end(self) -> None:
        """Kill the processes and wait for that. Chunks under way are never heard of again."""
        self._processes.stop()
        self._processes.join()

    def abandon(self) -> None:
        """`end` in the background: a thread of the pool itself cannot wait for the pool's threads."""
        threading.Thread(target=self.end, daemon=True).start()


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


@contextmanager
def _nameless_main() -> Iterator[None]:
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # no __spec__, no __file__: nothing for the child to import
    try:
        yield
    finally:
        sys.modules["__main__"] = main
