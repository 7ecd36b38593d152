"""Progress of long work, reported without a reference to whoever shows it.

The driver opens a phase (`with phase("rollout", 512, unit="sample")`), and the work inside calls
`report_progress(done)` from any depth or thread. A worker process of a cluster has no phase: it stores its `Latest`
report, which the driver polls and passes on with `relay`.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Progress:
    """How far a phase is: `done` of `total` units (`total` None: not known yet), and how many tokens it has sampled."""

    phase: str  # "" in a process that serves another one's phase
    done: float
    total: float | None
    unit: str = ""
    tokens: int = 0


@dataclass(eq=False)  # two phases of one name are still two
class Phase:
    """A phase under way, times in seconds of `time.monotonic`."""

    last: Progress
    thread: int = 0
    began: float = field(default_factory=time.monotonic)
    first: tuple[float, float] | None = None  # time and count of the first report, from which its rate is measured
    shown: float | None = None  # when a line was written about it


class _Board:
    """The state of the process: open phases, innermost last, and the listeners."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.listeners: list[Callable[[Progress], None]] = []
        self.phases: list[Phase] = []
        self.unnamed = Phase(Progress("", 0.0, None))

    def report(self, phase: Phase, **changes: Any) -> None:
        phase.last = replace(phase.last, **changes)
        for listener in self.listeners:
            listener(phase.last)

    def innermost(self) -> Phase:
        """The newest open phase of this thread; for a thread without one, the newest of all."""
        phases = [phase for phase in self.phases if phase.thread == threading.get_ident()] or self.phases
        return phases[-1] if phases else self.unnamed


_board = _Board()
# A forked child (a grader process, say) must not report to its parent's listeners, nor inherit a lock that is taken.
os.register_at_fork(after_in_child=_board.__init__)


def add_listener(listener: Callable[[Progress], None]) -> Callable[[], None]:
    """Call `listener` with every report from now on; the returned function removes it."""
    with _board.lock:
        _board.listeners = [*_board.listeners, listener]

    def remove() -> None:
        with _board.lock:
            _board.listeners = [other for other in _board.listeners if other != listener]

    return remove


def open_phases() -> list[Phase]:
    """The phases under way, outermost first."""
    with _board.lock:
        return list(_board.phases)


@contextmanager
def phase(name: str, total: float | None = None, *, unit: str = "") -> Iterator[None]:
    """Reports made inside the block belong to the phase `name`.

    Give `total` and `unit` (singular: "sample") only if the work inside counts in that unit; otherwise the total comes
    with the reports.
    """
    opened = Phase(Progress(name, 0.0, total, unit), threading.get_ident())
    with _board.lock:
        _board.phases.append(opened)
    try:
        yield
    finally:
        with _board.lock:
            _board.phases.remove(opened)


def report_progress(done: float, total: float | None = None) -> None:
    """Report that `done` of `total` is finished; None: the total that the phase already has. Any thread may call it."""
    with _board.lock:
        opened = _board.innermost()
        opened.first = opened.first or (time.monotonic(), done)
        _board.report(opened, done=done, total=opened.last.total if total is None else total)


def report_tokens(count: int) -> None:
    """Report that `count` more tokens have been sampled: samples may end late, and all at once."""
    with _board.lock:
        opened = _board.innermost()
        _board.report(opened, tokens=opened.last.tokens + count)


@contextmanager
def part(index: int, count: int) -> Iterator[None]:
    """Piece `index` (from 0) of `count` equal pieces of the phase, as a phase within it.

    A loop over mini-batches wraps its body in `part(i, n)`; the engine inside reports its micro-batches.
    """
    with phase(f"part {index + 1} of {count}"):
        yield
    report_progress(index + 1, count)  # not reached when the block raised: that piece is not done


class Latest:
    """Listener that stores the last report of a call, for a driver that polls it."""

    report: Progress | None = None

    def begin(self) -> None:
        """Forget the reports of the call before."""
        self.report, _board.unnamed = None, Phase(Progress("", 0.0, None))

    def __call__(self, progress: Progress) -> None:
        self.report = progress


def relay(snapshots: Sequence[Progress | None]) -> None:
    """Report the sum over workers, one snapshot each; workers without a report yet count as not begun.

    Steps are counted by the driver: a call outside of a step's phases is no part of them.
    """
    reports = [snapshot for snapshot in snapshots if snapshot is not None]
    with _board.lock:
        opened = _board.innermost()
        if not reports or opened.last.unit == "step":
            return
        opened.last = replace(opened.last, tokens=sum(report.tokens for report in reports))
    totals = [report.total or 0.0 for report in reports]
    total = sum(totals) * len(snapshots) / len(reports) if all(totals) else None
    report_progress(sum(report.done for report in reports), total)
