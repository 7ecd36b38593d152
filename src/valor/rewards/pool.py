"""One set of grader processes: chunks of samples in, their results out, and word of who was at fault when one died."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from pebble import CONSTS, ProcessPool

from valor.rewards.worker import CHUNK_SECONDS, RewardResult, WorkerSetup, grade_chunk, start_worker

# A grader may have made itself deaf to SIGTERM; SIGKILL follows after this many seconds.
CONSTS.term_timeout = 0.2


class PoolBrokenError(Exception):
    """This pool takes no more work; a new one has to be made."""


class GraderPool:
    """Processes that grade chunks: a slot for each, which a chunk has while it is under way.

    Before each sample a process writes the sample's place in the chunk into the slot's note, and its own number beside
    it, in memory that it shares with this one: so it is known whose grader was running when a process had to be killed
    or died, and whether it computes or waits.
    """

    def __init__(self, setup: WorkerSetup, num_workers: int, timeout: float) -> None:
        self.timeout = timeout
        self.num_slots = num_workers
        self.free_slots = list(range(num_workers))
        self.proven = False  # it has finished a chunk: its processes can start
        context: Any = _GraderContext()
        context.set_forkserver_preload([__name__])  # with all that a process needs: it starts at once
        self._places: MutableSequence[int] = context.RawArray("i", num_workers)
        self._pids: MutableSequence[int] = context.RawArray("i", num_workers)
        self._processes = ProcessPool(
            num_workers, initializer=start_worker, initargs=(setup, self._places, self._pids), context=context
        )

    def start_processes(self) -> None:
        """Now, and not with the first chunk. Raises PoolBrokenError."""
        self._schedule(int, ())

    def start(self, slot: int, samples: Sequence[bytes], on_done: Callable[[Future[list[RewardResult]]], None]) -> None:
        """Grade a chunk of pickled samples; `on_done` is called in another thread. Raises PoolBrokenError."""
        self._places[slot] = -1
        self._schedule(grade_chunk, (slot, list(samples))).add_done_callback(on_done)

    def under_way(self, slot: int) -> int | None:
        """Place in its chunk of the sample that was begun last, None before the first."""
        return None if self._places[slot] < 0 else self._places[slot]

    def num_computing(self) -> int:
        """How many processes have a processor or wait for one; where the system does not say, all."""
        return sum(map(_computes, self._pids))

    def end(self) -> None:
        """Kill the processes and wait for that. Chunks under way are never heard of again."""
        self._processes.stop()
        self._processes.join()

    def abandon(self) -> threading.Thread:
        """`end` in the background: a thread of the pool itself cannot wait for the pool's threads."""
        thread = threading.Thread(target=self.end, daemon=True)
        thread.start()
        return thread

    def _schedule(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Future[Any]:
        try:
            # A sample may begin just before the chunk's time is up.
            return self._processes.schedule(function, args=args, timeout=self.timeout + CHUNK_SECONDS)
        except RuntimeError:
            raise PoolBrokenError from None


def _computes(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:
        return True


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


_one_at_a_time = threading.Lock()  # pools start processes in threads of their own


@contextmanager
def _nameless_main() -> Iterator[None]:
    with _one_at_a_time:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # no __spec__, no __file__: nothing for the child to import
        try:
            yield
        finally:
            sys.modules["__main__"] = main
