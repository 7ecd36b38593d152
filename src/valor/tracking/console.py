"""The one console that progress bars and log lines share, and how durations and counts are written on it."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@cache
def get_console() -> Console:
    """Console on stdout: colours and bars on a real terminal; elsewhere plain text without control characters."""
    from rich.console import Console

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
    if value == 0 or (float(value).is_integer() and abs(value) < 1e12):
        return f"{value:,.0f}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.4g}"
