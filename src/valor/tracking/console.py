"""The one console that log lines and progress share: how a step, durations and counts are written on it.

A phase that takes long is told of in a line every ten seconds.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from rich.console import Console

from valor.errors import drop
from valor.tracking.progress import Phase, open_phases

EVERY = 10.0  # seconds between lines about a phase
_SHOWN = 100  # characters of a sample's prompt, and half of those of its response

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
_PROGRESS = "progress"  # name of the thread


class _Console(Console):
    may_be_unread = False
    """Whether lines are dropped when their reader has gone; else that ends the command, as for lines that are printed
    (rich would exit with 1)."""

    def on_broken_pipe(self) -> None:
        if not self.may_be_unread:
            raise BrokenPipeError
        drop(sys.stdout)


@cache
def get_console() -> _Console:
    """Console on stdout: colours on a real terminal; elsewhere plain text without control characters."""
    terminal = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
    return _Console(
        force_terminal=terminal,  # and not what FORCE_COLOR or a CI variable would have rich believe
        force_interactive=terminal,
        force_jupyter=False,
        color_system="auto" if terminal else None,
        highlight=False,
        soft_wrap=True,  # a log line stays one line in a file
    )


def say(line: str) -> None:
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
        if value is None or (label == "ev" and math.isnan(value)):  # returns that are all equal have nothing to explain
            continue
        text = f"{label} {value:{form}}" if math.isfinite(value) else f"{label} {value}"
        if label == "ev" and (within := metrics.get("critic/vf_explained_var_within")) is not None:
            text += f" ({within:.2f} within prompts)"
        if label == "len" and (cut := metrics.get("response_length/clip_ratio", 0)) > 0:
            text += f" ({cut:.0%} cut)"
        parts.append(text)
    seconds = metrics.get("timing_s/step", metrics.get("perf/time_per_step"))
    if seconds is not None:
        parts.append(format_seconds(seconds))
    if "perf/throughput" in metrics:
        parts.append(f"{metrics['perf/throughput']:,.0f} tok/s")
    validation = validation_scores(metrics)
    ends = [source.rpartition("/")[2] for source in validation]
    names = ends if len({*ends}) == len(ends) else list(validation)
    for name, score in zip(names, validation.values(), strict=True):
        parts.append(f"val {name} {score:.3f}" if len(names) > 1 else f"val {score:.3f}")
    return "  ".join(parts)


def sample_line(step: int, prompt: str, response: str, score: float) -> str:
    """`step 10, a sample: 12+30= -> 42 [score 1]`, the end of a long prompt and the start of a long response."""
    prompt, response = " ".join(prompt.split()), " ".join(response.split())
    prompt = prompt if len(prompt) <= _SHOWN else f"…{prompt[-_SHOWN:]}"
    response = response if len(response) <= 2 * _SHOWN else f"{response[: 2 * _SHOWN]}…"
    return f"step {step}, a sample: {prompt} -> {response} [score {score:.3g}]"


def validation_scores(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Mean validation scores by data source, of `val-core/<data source>/<variable>/mean@<n>`."""
    return {
        key.removeprefix("val-core/").rsplit("/", 2)[0]: value
        for key, value in metrics.items()
        if key.startswith("val-core/") and key.rpartition("/")[2].startswith("mean@")
    }


@contextmanager
def show_progress() -> Iterator[None]:
    """While the block runs, long phases of this process are told on the console; a block in another changes nothing."""
    if any(thread.name == _PROGRESS for thread in threading.enumerate()):
        yield
        return
    ended = threading.Event()

    def keep_showing() -> None:
        while not ended.wait(0.5):
            show_phases()

    thread = threading.Thread(target=keep_showing, name=_PROGRESS, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def show_phases() -> None:
    """A line about the phases under way, every EVERY seconds of a phase of a step."""
    phases, now = open_phases(), time.monotonic()
    for timed in (phases[1:] or phases)[:1]:
        if now - (timed.shown or timed.began) >= EVERY:
            timed.shown = now
            say(" > ".join(phase_text(phase, now) for phase in phases))


def phase_text(phase: Phase, now: float) -> str:
    """`rollout: 120/512 samples, 43,210 tokens, 12.3 samples/s, 32.0 s left`, as far as it is known.

    The rate is that since the first report; without one: `20.0 s so far`.
    """
    done, total, unit, parts = phase.done, phase.total, phase.unit, []
    if total is not None or done:
        units = f" {unit if (total or done) == 1 else _plural(unit)}" if unit else ""
        parts.append(f"{done:.0f}{'' if total is None else f'/{total:.0f}'}{units}")
    if phase.tokens:
        parts.append(f"{phase.tokens:,} tokens")
    since, count = phase.first or (now, done)
    rate = (done - count) / (now - since) if now > since else 0.0
    if rate > 0 and unit:
        per_second = f"{rate:,.0f}" if rate >= 100 else f"{round(rate, 1):g}"
        parts.append(f"{per_second} {_plural(unit)}/s" if rate >= 0.5 else f"{format_seconds(1 / rate)} per {unit}")
    if rate > 0 and total is not None:
        parts.append(f"{format_seconds((total - done) / rate)} left")
    elif rate <= 0:
        parts.append(f"{format_seconds(now - phase.began)} so far")
    return f"{phase.name}: {', '.join(parts)}"


def _plural(unit: str) -> str:
    return unit + ("es" if unit.endswith(("ch", "sh", "s", "x")) else "s")
