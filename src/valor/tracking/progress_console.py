"""Shows ambient progress on a console: live bars on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from valor.tracking.console import format_number, format_seconds, get_console
from valor.tracking.progress import Progress, add_listener

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

PLAIN_EVERY = 10.0  # seconds between the plain lines of one phase


@contextmanager
def show_progress(console: Console | None = None) -> Iterator[None]:
    """While the block runs, every phase of this process shows on `console` (default: stdout)."""
    console = console or get_console()
    if console.is_terminal:
        listener = LiveBars(console)
    else:
        listener = PlainLines(lambda line: console.print(line, markup=False), PLAIN_EVERY)
    remove = add_listener(listener)
    try:
        yield
    finally:
        remove()
        if isinstance(listener, LiveBars):
            listener.close()


class Pace:
    """How fast a phase goes: the mean over its reports, the first of which may stand above zero (a resumed run)."""

    def __init__(self, now: float) -> None:
        self.began = now
        self._first: tuple[float, float] | None = None  # (time, done)
        self._last = (now, 0.0)

    def report(self, done: float, now: float) -> None:
        """Take note that `done` units are finished at time `now` (seconds)."""
        self._first = self._first or (now, done)
        self._last = (now, done)

    def rate(self) -> float | None:
        """Units per second; None before the second report."""
        if self._first is None or self._last[0] <= self._first[0] or self._last[1] <= self._first[1]:
            return None
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])

    def seconds_left(self, total: float | None, now: float) -> float | None:
        """Until `total` units at that rate; None if unknown."""
        rate = self.rate()
        if rate is None or total is None:
            return None
        return max((total - self._last[1]) / rate - (now - self._last[0]), 0.0)

    def describe(self, total: float | None, unit: str, now: float) -> str:
        """`12.3 samples/s, 32.0 s left`, as far as it is known."""
        rate, left = self.rate(), self.seconds_left(total, now)
        parts = [_rate(rate, unit)] if rate is not None and unit else []
        return ", ".join([*parts, f"{format_seconds(left)} left"] if left is not None else parts)


class PlainLines:
    """Listener for logs and pipes: a line every `every` seconds of a long phase, and one at its end; no thread."""

    def __init__(
        self, write: Callable[[str], object], every: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._every, self._clock = write, every, clock
        self._paces: dict[tuple[int, str], Pace] = {}  # (depth, phase) -> pace
        self._last_line: dict[tuple[int, str], float] = {}  # of the phases that were long enough for a line

    def __call__(self, progress: Progress) -> None:
        key, now = (progress.depth, progress.phase), self._clock()
        if progress.state == "start":
            self._paces[key] = Pace(now)
        if key not in self._paces:  # begun before anybody listened
            return
        pace = self._paces[key]
        if progress.state == "update":
            pace.report(progress.done, now)
            if now - self._last_line.get(key, pace.began) >= self._every:
                self._last_line[key] = now
                parts = (
                    _count(progress.done, progress.total, progress.unit),
                    pace.describe(progress.total, progress.unit, now),
                )
                self._write(f"{progress.phase}: {', '.join(part for part in parts if part)}")
        elif progress.state == "end":
            del self._paces[key]
            if self._last_line.pop(key, None) is not None:
                self._write(f"{progress.phase}: finished in {format_seconds(now - pace.began)}")


@dataclass
class _Row:
    depth: int
    phase: str
    task: TaskID
    pace: Pace
    done: float = 0.0


class LiveBars:
    """Listener that draws one bar per phase.

    A finished phase stays on screen until the phase around it moves on, so that a step's phases are seen together;
    nothing remains in the scrollback.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: RichProgress | None = None
        self._rows: list[_Row] = []  # top to bottom

    def __call__(self, progress: Progress) -> None:
        if progress.state == "start":
            self._start(progress)
            return
        row = self._newest(progress)
        if self._bars is None or row is None:
            return
        if progress.state == "end" or progress.done != row.done:
            self._drop_below(progress.depth)
        row.done = progress.done
        row.pace.report(progress.done, time.monotonic())
        if progress.state == "update":
            self._bars.update(row.task, completed=progress.done, total=progress.total)
            return
        total = progress.total or progress.done or 1
        self._bars.update(row.task, completed=total, total=total)
        self._bars.stop_task(row.task)
        if progress.depth == 0:
            self.close()

    def close(self) -> None:
        """Take the bars off the screen."""
        if self._bars is not None:
            self._bars.stop()
        self._bars, self._rows = None, []

    def _start(self, progress: Progress) -> None:
        if self._bars is None:
            self._bars = _make_bars(self._console)
            self._bars.start()
        description = "  " * progress.depth + progress.phase
        pace = Pace(time.monotonic())
        task = self._bars.add_task(description, total=progress.total, unit=progress.unit, pace=pace)
        self._rows.append(_Row(progress.depth, progress.phase, task, pace))

    def _newest(self, progress: Progress) -> _Row | None:
        """The newest row of that depth and name: a phase may come twice within one step."""
        key = (progress.depth, progress.phase)
        return next((row for row in reversed(self._rows) if (row.depth, row.phase) == key), None)

    def _drop_below(self, depth: int) -> None:
        """Remove the rows under the newest row of `depth`."""
        while self._rows and self._rows[-1].depth > depth and self._bars is not None:
            self._bars.remove_task(self._rows.pop().task)


def _make_bars(console: Console) -> RichProgress:
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class Count(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(_count(task.completed, task.total, task.fields["unit"]), justify="right")

    class Speed(ProgressColumn):
        def render(self, task: Task) -> Text:
            elapsed = format_seconds(task.elapsed or 0.0)
            if task.stop_time is not None:
                return Text(elapsed, style="green")
            pace = task.fields["pace"].describe(task.total, task.fields["unit"], time.monotonic())
            return Text(pace or elapsed, style="dim")

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        Count(),
        Speed(),
        console=console,
        transient=True,
        refresh_per_second=4,  # smooth enough, and a core is worth more to the training beside it
    )


def _count(done: float, total: float | None, unit: str) -> str:
    """`120/512 samples`; `37%` where `done` is not whole; `` where nothing was counted."""
    if not float(done).is_integer():
        return f"{done / total:.0%}" if total else ""
    if total is None and done == 0:
        return ""
    count = f"{done:.0f}" if total is None else f"{done:.0f}/{total:.0f}"
    return f"{count} {unit if (total or done) == 1 else _plural(unit)}" if unit else count


def _rate(rate: float, unit: str) -> str:
    """`12.3 samples/s`, or `48.0 s per step` where that reads better."""
    if rate < 0.5:
        return f"{format_seconds(1 / rate)} per {unit}"
    return f"{format_number(round(rate, 1) if rate < 100 else round(rate))} {_plural(unit)}/s"


def _plural(unit: str) -> str:
    return unit + ("es" if unit.endswith(("ch", "sh", "s", "x")) else "s")
