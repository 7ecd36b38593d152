"""The one console that progress bars and log lines share, and how a step, durations and counts are written on it."""

import math
import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import TypeVar

from rich.console import Console

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


def format_number(value: float) -> str:
    """Four significant digits for a reader: `1,240`, `0.5312`, `1.2e-06`; whole numbers stay whole."""
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.4g}"


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
