"""Shows progress on a console: live bars on a terminal, now and then a plain line elsewhere. Rates are rich's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from valor.tracking.console import format_number, format_seconds, get_console
from valor.tracking.progress import Progress, add_listener

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import Task, TaskID

PLAIN_EVERY = 10.0  # seconds between the plain lines of one phase
_RATE_WINDOW = 3600.0  # seconds over which rich averages the rate


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


class PlainLines:
    """Listener for logs and pipes: a line every `every` seconds of a long phase, and one at its end; no thread."""

    def __init__(
        self, write: Callable[[str], object], every: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        from rich.progress import Progress as RichProgress

        self._write, self._every, self._clock = write, every, clock
        self._tracked = RichProgress(disable=True, get_time=clock, speed_estimate_period=_RATE_WINDOW)
        self._tasks: dict[tuple[int, str], TaskID] = {}  # (depth, phase) of the phases under way
        self._last_line: dict[TaskID, float] = {}  # of the phases that were long enough for a line

    def __call__(self, progress: Progress) -> None:
        key, now = (progress.depth, progress.phase), self._clock()
        if progress.state == "start":
            self._tasks[key] = self._tracked.add_task(progress.phase, total=progress.total)
        if key not in self._tasks:  # begun before anybody listened
            return
        number = self._tasks[key]
        if progress.state == "update":
            self._tracked.update(number, completed=progress.done, total=progress.total)
            [task] = [one for one in self._tracked.tasks if one.id == number]
            if now - self._last_line.get(number, task.start_time or now) >= self._every:
                self._last_line[number] = now
                parts = (format_count(task.completed, task.total, progress.unit), format_pace(task, progress.unit))
                self._write(f"{progress.phase}: {', '.join(part for part in parts if part)}")
        elif progress.state == "end":
            [task] = [one for one in self._tracked.tasks if one.id == number]
            if self._last_line.pop(number, None) is not None:
                self._write(f"{progress.phase}: finished in {format_seconds(now - (task.start_time or now))}")
            self._tracked.remove_task(self._tasks.pop(key))


class LiveBars:
    """Listener that draws one bar per phase.

    A finished phase stays on screen until the phase around it moves on, so that a step's phases are seen together;
    nothing remains in the scrollback.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: RichProgress | None = None
        self._rows: list[tuple[int, str, TaskID]] = []  # (depth, phase, task), top to bottom
        self._done: dict[TaskID, float] = {}

    def __call__(self, progress: Progress) -> None:
        if progress.state == "start":
            self._start(progress)
            return
        key = (progress.depth, progress.phase)
        # The newest row of that depth and name: a phase may come twice within one step.
        task = next((task for *row, task in reversed(self._rows) if tuple(row) == key), None)
        if self._bars is None or task is None:
            return
        if progress.state == "end" or progress.done != self._done[task]:
            while self._rows[-1][0] > progress.depth:
                self._bars.remove_task(self._rows.pop()[2])
        self._done[task] = progress.done
        if progress.state == "update":
            self._bars.update(task, completed=progress.done, total=progress.total)
            return
        total = progress.total or progress.done or 1
        self._bars.update(task, completed=total, total=total)
        self._bars.stop_task(task)
        if progress.depth == 0:
            self.close()

    def close(self) -> None:
        """Take the bars off the screen."""
        if self._bars is not None:
            self._bars.stop()
        self._bars, self._rows, self._done = None, [], {}

    def _start(self, progress: Progress) -> None:
        if self._bars is None:
            self._bars = _make_bars(self._console)
            self._bars.start()
        task = self._bars.add_task("  " * progress.depth + progress.phase, total=progress.total, unit=progress.unit)
        self._rows.append((progress.depth, progress.phase, task))
        self._done[task] = 0.0


def _make_bars(console: Console) -> RichProgress:
    from rich.progress import BarColumn, ProgressColumn, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class Count(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(format_count(task.completed, task.total, task.fields["unit"]), justify="right")

    class Speed(ProgressColumn):
        def render(self, task: Task) -> Text:
            elapsed = format_seconds(task.elapsed or 0.0)
            if task.stop_time is not None:
                return Text(elapsed, style="green")
            return Text(format_pace(task, task.fields["unit"]) or elapsed, style="dim")

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        Count(),
        Speed(),
        console=console,
        transient=True,
        refresh_per_second=4,  # smooth enough, and a core is worth more to the training beside it
        speed_estimate_period=_RATE_WINDOW,
    )


def format_count(done: float, total: float | None, unit: str) -> str:
    """`120/512 samples`; `37%` where `done` is not whole; nothing where nothing was counted."""
    if not float(done).is_integer():
        return f"{done / total:.0%}" if total else ""
    if total is None and done == 0:
        return ""
    count = f"{done:.0f}" if total is None else f"{done:.0f}/{total:.0f}"
    return f"{count} {unit if (total or done) == 1 else _plural(unit)}" if unit else count


def format_pace(task: Task, unit: str) -> str:
    """`12.3 samples/s, 32.0 s left`, or `48.0 s per step` where that reads better; nothing before the second report."""
    rate, left, parts = task.speed, task.time_remaining, []
    if rate and unit:
        per_second = f"{format_number(round(rate, 1) if rate < 100 else round(rate))} {_plural(unit)}/s"
        parts.append(per_second if rate >= 0.5 else f"{format_seconds(1 / rate)} per {unit}")
    if left is not None:
        parts.append(f"{format_seconds(left)} left")
    return ", ".join(parts)


def _plural(unit: str) -> str:
    return unit + ("es" if unit.endswith(("ch", "sh", "s", "x")) else "s")
