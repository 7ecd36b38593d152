"""Progress reports of long work, without a reference to whoever shows them.

The driver opens a phase (`with phase("rollout", 512, unit="sample")`), and the work inside calls
`report_progress(done)` from any depth or thread. A worker process of a cluster has no phase: it stores its `Latest`
report, which the driver polls and passes on with `relay`.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Progress:
    """How far a phase is: `done` of `total` units (`total` None: not known yet), and how many tokens it has sampled."""

    phase: str  # "" in a process that serves someone else's phase
    done: float
    total: float | None
    unit: str = ""
    depth: int = 0  # 0: no phase around this one
    state: Literal["start", "update", "end"] = "update"
    tokens: int = 0


Listener = Callable[[Progress], None]


@dataclass(eq=False)  # two phases of one name are still two
class _Open:
    """A phase under way: its last report, and (index, count) of the nested `part` blocks, outermost first."""

    last: Progress
    thread: int = 0
    parts: list[tuple[int, int]] = field(default_factory=list)


class _Board:
    """The state of the process: open phases, innermost last, and the listeners."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.listeners: list[Listener] = []
        self.phases: list[_Open] = []
        self.unnamed = _Open(Progress("", 0.0, None))

    def report(self, opened: _Open, **changes: Any) -> None:
        opened.last = replace(opened.last, **changes)
        for listener in list(self.listeners):
            listener(opened.last)

    def innermost(self) -> _Open:
        """The newest open phase of this thread; for a thread without one, the newest of all."""
        own = [one for one in self.phases if one.thread == threading.get_ident()] or self.phases
        return own[-1] if own else self.unnamed


_board = _Board()
# A forked child (a grader process, say) must not draw on its parent's terminal, nor inherit a lock that is held.
os.register_at_fork(after_in_child=_board.__init__)


def add_listener(listener: Listener) -> Callable[[], None]:
    """Call `listener` with every report from now on; the returned function removes it."""
    with _board.lock:
        _board.listeners.append(listener)

    def remove() -> None:
        with _board.lock:
            if listener in _board.listeners:
                _board.listeners.remove(listener)

    return remove


@contextmanager
def phase(name: str, total: float | None = None, *, unit: str = "") -> Iterator[None]:
    """Reports made inside the block belong to the phase `name`.

    Give `total` and `unit` (singular: "sample") only if the work inside counts in that unit; otherwise the total comes
    with the reports.
    """
    with _board.lock:
        thread = threading.get_ident()
        depth = sum(one.thread == thread for one in _board.phases)
        opened = _Open(Progress(name, 0.0, total, unit, depth, "start"), thread)
        _board.phases.append(opened)
        _board.report(opened)
    try:
        yield
    finally:
        with _board.lock:
            _board.phases.remove(opened)
            _board.report(opened, state="end")


def report_progress(done: float, total: float | None = None) -> None:
    """Report that `done` of `total` is finished; None: the total that the phase already has.

    Any thread may call it, as often as it likes: without a listener it costs about a microsecond.
    """
    with _board.lock:
        opened = _board.innermost()
        if opened.parts:
            share = done / total if total else 0.0
            for index, count in reversed(opened.parts):
                done, total = index + share, count
                share = done / count
        _board.report(opened, done=done, total=opened.last.total if total is None else total, state="update")


def report_tokens(count: int) -> None:
    """Report that `count` more tokens have been sampled: samples may end late, and all at once."""
    with _board.lock:
        opened = _board.innermost()
        _board.report(opened, tokens=opened.last.tokens + count, state="update")


@contextmanager
def part(index: int, count: int) -> Iterator[None]:
    """Reports inside the block belong to piece `index` (from 0) of `count` equal pieces of the phase. Parts nest.

    A loop over mini-batches wraps its body in `part(i, n)`; the engine inside reports its micro-batches.
    """
    with _board.lock:
        opened = _board.innermost()
        opened.parts.append((index, count))
    try:
        yield
    finally:
        with _board.lock:
            opened.parts.pop()
    report_progress(index + 1, count)  # not reached when the block raised: that piece is not done


class Latest:
    """Listener that stores the last report of a call, for a driver that polls it."""

    report: Progress | None = None

    def begin(self) -> None:
        """A new call: nothing has been reported of it."""
        self.report, _board.unnamed = None, _Open(Progress("", 0.0, None))

    def __call__(self, progress: Progress) -> None:
        self.report = progress


def relay(snapshots: Sequence[Progress | None]) -> None:
    """Report the sum over workers, one snapshot each; workers without a report yet count as not begun.

    Steps are the driver's to count: a call outside of a step's phases is no part of them.
    """
    known = [one for one in snapshots if one is not None]
    with _board.lock:
        opened = _board.innermost()
        if not known or opened.last.unit == "step":
            return
        opened.last = replace(opened.last, tokens=sum(one.tokens for one in known))
    totals = [one.total for one in known if one.total is not None]
    complete = len(totals) == len(known)
    report_progress(sum(one.done for one in known), sum(totals) * len(snapshots) / len(known) if complete else None)
