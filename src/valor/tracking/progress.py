"""Progress of long work, reported without a reference to whoever shows it.

The driver opens a phase (`with phase("rollout", 512, unit="sample")`), and the work inside calls
`report_progress(done)` from any depth or thread. A worker process of a cluster has no phase: it stores the last report
of each call, which the driver polls and passes on with `relay`.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)  # two phases of one name are still two
class Phase:
    """How far a phase is: `done` of `total` units (None: not known yet), and how many tokens it has sampled.

    Times are seconds of `time.monotonic`.
    """

    name: str = ""
    total: float | None = None
    unit: str = ""
    done: float = 0.0
    tokens: int = 0
    thread: int = field(default_factory=threading.get_ident)
    began: float = field(default_factory=time.monotonic)
    first: tuple[float, float] | None = None  # time and count of the first report, from which its rate is measured
    shown: float | None = None  # when a line was written about it

    def report(self, **changes: Any) -> None:
        vars(self).update(changes)


class _Board:
    """The state of the process: open phases, innermost last, and the reports that belong to none."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.phases: list[Phase] = []
        self.call = Phase()

    def innermost(self) -> Phase:
        """The newest open phase of this thread; for a thread without one, the newest of all."""
        phases = [phase for phase in self.phases if phase.thread == threading.get_ident()] or self.phases
        return phases[-1] if phases else self.call


_board = _Board()
# A forked child (a grader process, say) must not report to its parent's phases, nor inherit a lock that is taken.
os.register_at_fork(after_in_child=_board.__init__)


def open_phases() -> list[Phase]:
    """The phases under way, outermost first."""
    with _board.lock:
        return list(_board.phases)


@contextmanager
def phase(name: str, total: float | None = None, *, unit: str = "") -> Iterator[Phase]:
    """Reports made inside the block belong to the phase `name`.

    Give `total` and `unit` (singular: "sample") only if the work inside counts in that unit; otherwise the total comes
    with the reports.
    """
    opened = Phase(name, total, unit)
    with _board.lock:
        _board.phases.append(opened)
    try:
        yield opened
    finally:
        with _board.lock:
            _board.phases.remove(opened)


def report_progress(done: float, total: float | None = None) -> None:
    """Report that `done` of `total` is finished; None: the total that the phase already has. Any thread may call it."""
    with _board.lock:
        opened = _board.innermost()
        opened.first = opened.first or (time.monotonic(), done)
        opened.report(done=done, total=opened.total if total is None else total)


def report_tokens(count: int) -> None:
    """Report that `count` more tokens have been sampled: samples may end late, and all at once."""
    with _board.lock:
        opened = _board.innermost()
        opened.report(tokens=opened.tokens + count)


@contextmanager
def part(index: int, count: int) -> Iterator[None]:
    """Piece `index` (from 0) of `count` equal pieces of the phase, as a phase within it.

    A loop over mini-batches wraps its body in `part(i, n)`; the engine inside reports its micro-batches.
    """
    with phase(f"part {index + 1} of {count}"):
        yield
    report_progress(index + 1, count)  # not reached when the block raised: that piece is not done


def begin_call() -> None:
    """In a worker: forget the reports of the call before."""
    _board.call = Phase()


def call_progress() -> Phase | None:
    """In a worker: how far the call under way is; None before its first report."""
    call = _board.call
    return call if call.first or call.tokens else None


def relay(calls: Sequence[Phase | None]) -> None:
    """Report the sum over workers, one call each; workers without a report yet count as not begun.

    Steps are counted by the driver: a call outside of a step's phases is no part of them.
    """
    reports = [call for call in calls if call is not None]
    with _board.lock:
        opened = _board.innermost()
        if not reports or opened.unit == "step":
            return
        opened.tokens = sum(report.tokens for report in reports)
    totals = [report.total or 0.0 for report in reports]
    total = sum(totals) * len(calls) / len(reports) if all(totals) else None
    report_progress(sum(report.done for report in reports), total)
