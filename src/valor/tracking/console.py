"""The one console that log lines and progress share: how a step, durations and counts are written on it, and progress
as live bars on a terminal, elsewhere now and then as a plain line. Rates are rich's."""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from valor.tracking.progress import Progress, add_listener

PLAIN_EVERY = 10.0  # seconds between the plain lines of one phase

# label, keys in order of preference, number format; the line shows those that the step has
_COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("critic/score/mean", "critic/rewards/mean"), ".3f"),
    ("kl", ("actor/reward_kl_penalty", "actor/kl_loss"), ".4f"),
    ("ev", ("critic/vf_explained_var",), ".2f"),
    ("gate", ("critic/gate",), ".2f"),
    ("len", ("response_length/mean",), ".0f"),
    ("loss", ("train/loss",), ".4f"),
    ("accuracy", ("train/accuracy",), ".3f"),
    ("lr", ("train/lr",), ".2g"),
    ("val loss", ("val/loss",), ".4f"),
    ("val accuracy", ("val/accuracy", "val/token_accuracy"), ".3f"),
)
Value = TypeVar("Value")
_shown = False


@cache
def get_console() -> Console:
    """Console on stdout: colours and bars on a real terminal; elsewhere plain text without control characters."""
    terminal = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
    return Console(
        force_terminal=terminal,  # and not what FORCE_COLOR or a CI variable would have rich believe
        force_interactive=terminal,
        force_jupyter=False,
        color_system="auto" if terminal else None,
        highlight=False,
        soft_wrap=True,  # a log line stays one line in a file
    )


def say(line: str) -> None:
    """A line for the user, above the bars."""
    get_console().print(line, markup=False)


def format_seconds(seconds: float) -> str:
    """`0.84 s`, `18.4 s`, `3 min 05 s`, `2 h 04 min`."""
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {round(seconds) % 60:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def summary_line(step: int, metrics: Mapping[str, float], total_steps: int | None = None) -> str:
    """`step  12/100  reward 0.534  kl 0.0012  ev 0.63  len 214 (3% cut)  18.4 s  1,240 tok/s  val 0.712`."""
    width = len(str(total_steps or ""))
    parts = [f"step {step:>{width}}/{total_steps}" if total_steps else f"step {step}"]
    for label, keys, form in _COLUMNS:
        value = next((metrics[key] for key in keys if key in metrics), None)
        if value is None:
            continue
        text = f"{label} {value:{form}}" if math.isfinite(value) else f"{label} {value}"
        if label == "len" and (cut := metrics.get("response_length/clip_ratio", 0)) > 0:
            text += f" ({cut:.0%} cut)"
        parts.append(text)
    seconds = metrics.get("timing_s/step", metrics.get("perf/time_per_step"))
    if seconds is not None:
        parts.append(format_seconds(seconds))
    if "perf/throughput" in metrics:
        parts.append(f"{metrics['perf/throughput']:,.0f} tok/s")
    validation = validation_scores(metrics)
    short = {source: source.rpartition("/")[2] for source in validation}  # where that is still unambiguous
    for source, score in validation.items():
        name = short[source] if len({*short.values()}) == len(short) else source
        parts.append(f"val {name} {score:.3f}" if len(short) > 1 else f"val {score:.3f}")
    return "  ".join(parts)


def validation_scores(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """What there is of the mean validation score by data source: `val-core/<data source>/<variable>/mean@<n>`."""
    return {
        key.removeprefix("val-core/").rsplit("/", 2)[0]: value
        for key, value in metrics.items()
        if key.startswith("val-core/") and key.rpartition("/")[2].startswith("mean@")
    }


@contextmanager
def show_progress() -> Iterator[None]:
    """While the block runs, every phase of this process shows on the console; a block in another changes nothing."""
    global _shown
    if _shown:
        yield
        return
    view, ended = PhaseView(get_console()), threading.Event()

    def keep_telling() -> None:
        while not ended.wait(1.0):
            view.tell()

    teller = threading.Thread(target=keep_telling, name="progress", daemon=True)
    remove, _shown = add_listener(view), True
    teller.start()
    try:
        yield
    finally:
        _shown = False
        remove()
        ended.set()
        teller.join()
        view.close()


class PhaseView:
    """Listener that draws a bar for each phase on a terminal. Elsewhere it writes a line when a phase begins for the
    first time, and of a long one another every PLAIN_EVERY seconds and at its end, whether it reports or not (`tell`).

    A finished phase stays on screen until the phase around it moves on, so that a step's phases are seen together;
    nothing remains in the scrollback.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self.bars = _make_bars(console, clock)
        self._lock = threading.RLock()
        self._met: set[str] = set()

    def tell(self) -> None:
        """The plain line of the innermost phase, when it is time for one."""
        with self._lock:
            under_way = [task for task in self.bars.tasks if task.stop_time is None]
            if under_way:
                self._tell(under_way[-1])

    def __call__(self, progress: Progress) -> None:
        with self._lock:
            if progress.state == "start":
                self._start(progress)
                return
            key = (progress.depth, progress.phase)
            rows = self.bars.tasks[::-1]  # from the bottom: a phase may come twice within one step
            task = next((row for row in rows if row.fields["key"] == key), None)
            if task is None:  # begun before anybody listened
                return
            if progress.state == "end" or progress.done != task.completed:
                for row in takewhile(lambda row: row.fields["key"][0] > progress.depth, rows):
                    self.bars.remove_task(row.id)
            if progress.state == "update":
                self.bars.update(task.id, completed=progress.done, total=progress.total, tokens=progress.tokens)
                self._tell(task)
            else:
                self._end(task, progress.total or progress.done or 1)

    def close(self) -> None:
        """Take the bars off the screen."""
        for task in self.bars.tasks:
            self.bars.remove_task(task.id)
        self.bars.stop()

    def _start(self, progress: Progress) -> None:
        self.bars.start()
        key = (progress.depth, progress.phase)
        name = "  " * progress.depth + progress.phase
        self.bars.add_task(name, total=progress.total, key=key, unit=progress.unit, told=None, tokens=0)
        if not self._console.is_terminal and progress.phase not in self._met:
            self._met.add(progress.phase)
            self._write(f"{progress.phase}: {format_count(self.bars.tasks[-1]) or 'begins'}")

    def _tell(self, task: Task) -> None:
        """The plain line about a phase under way, when it is time for one."""
        now, since = self._clock(), task.fields["told"] or task.start_time or 0.0
        if not self._console.is_terminal and now - since >= PLAIN_EVERY:
            task.fields["told"] = now
            parts = (format_count(task), format_pace(task) or f"{format_seconds(task.elapsed or 0.0)} so far")
            self._write(f"{task.fields['key'][1]}: {', '.join(part for part in parts if part)}")

    def _end(self, task: Task, total: float) -> None:
        self.bars.update(task.id, completed=total, total=total)
        self.bars.stop_task(task.id)
        if task.fields["told"] is not None:
            self._write(f"{task.fields['key'][1]}: finished in {format_seconds(task.elapsed or 0.0)}")
        if task.fields["key"][0] == 0:
            self.bars.remove_task(task.id)
            if not self.bars.tasks:
                self.close()

    def _write(self, line: str) -> None:
        self._console.print(line, markup=False)


def _make_bars(console: Console, clock: Callable[[], float]) -> Bars:
    """One row per phase; without a terminal nothing is drawn and the rows only keep count and time."""

    class Count(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(format_count(task), justify="right")

    class Speed(ProgressColumn):
        def render(self, task: Task) -> Text:
            elapsed = format_seconds(task.elapsed or 0.0)
            if task.stop_time is not None:
                return Text(elapsed, style="green")
            return Text(format_pace(task) or elapsed, style="dim")

    return Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        Count(),
        Speed(),
        console=console,
        transient=True,
        refresh_per_second=4,  # smooth enough, and a core is worth more to the training beside it
        speed_estimate_period=3600.0,  # seconds over which the rate is averaged
        get_time=clock,
        disable=not console.is_terminal,
    )


def format_count(task: Task) -> str:
    """`120/512 samples, 43,210 tokens`; `37%` where what is done is not whole; nothing where nothing was counted."""
    done, total, unit = task.completed, task.total, task.fields["unit"]
    count = f"{done:.0f}/{total:.0f}" if total is not None else f"{done:.0f}" if done else ""
    if not float(done).is_integer():
        count = f"{done / total:.0%}" if total else ""
    elif count and unit:
        count += f" {unit if (total or done) == 1 else _plural(unit)}"
    tokens = f"{task.fields['tokens']:,} tokens" if task.fields.get("tokens") else ""
    return ", ".join(part for part in (count, tokens) if part)


def format_pace(task: Task) -> str:
    """`12.3 samples/s, 32.0 s left`, or `48.0 s per step` where that reads better; nothing before the second report."""
    rate, left, unit, parts = task.speed, task.time_remaining, task.fields["unit"], []
    if rate and unit:
        per_second = f"{rate:,.0f}" if rate >= 100 else f"{round(rate, 1):g}"
        parts.append(f"{per_second} {_plural(unit)}/s" if rate >= 0.5 else f"{format_seconds(1 / rate)} per {unit}")
    if left is not None:
        parts.append(f"{format_seconds(left)} left")
    return ", ".join(parts)


def _plural(unit: str) -> str:
    return unit + ("es" if unit.endswith(("ch", "sh", "s", "x")) else "s")
