"""The console's one line per step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from valor.tracking.console import format_seconds, get_console
from valor.tracking.histogram import Histogram

# label, keys in order of preference, number format; the line shows those that the step has
_COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("critic/score/mean", "critic/rewards/mean"), ".3f"),
    ("kl", ("actor/reward_kl_penalty", "actor/kl_loss"), ".4f"),
    ("ev", ("critic/vf_explained_var",), ".2f"),
    ("len", ("response_length/mean",), ".0f"),
)
_CUT = "response_length/clip_ratio"
_SECONDS = ("timing_s/step", "perf/time_per_step")
_THROUGHPUT = "perf/throughput"
Value = TypeVar("Value")


class ConsoleLogger:
    """Prints `summary_line` of each step."""

    def __init__(self, total_steps: int | None = None) -> None:
        self._total_steps = total_steps

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        """Print the step without its histograms; above the progress bars while they are shown."""
        get_console().print(summary_line(step, metrics, self._total_steps), markup=False)

    def close(self) -> None:
        """Nothing is held open."""


def summary_line(step: int, metrics: Mapping[str, float], total_steps: int | None = None) -> str:
    """`step  12/100  reward 0.534  kl 0.0012  ev 0.63  len 214 (3% cut)  18.4 s  1,240 tok/s  val 0.712`."""
    width = len(str(total_steps or ""))
    parts = [f"step {step:>{width}}/{total_steps}" if total_steps else f"step {step}"]
    for label, keys, form in _COLUMNS:
        value = next((metrics[key] for key in keys if key in metrics), None)
        if value is None:
            continue
        text = f"{label} {value:{form}}" if math.isfinite(value) else f"{label} {value}"
        if label == "len" and metrics.get(_CUT, 0) > 0:
            text += f" ({metrics[_CUT]:.0%} cut)"
        parts.append(text)
    seconds = next((metrics[key] for key in _SECONDS if key in metrics), None)
    if seconds is not None:
        parts.append(format_seconds(seconds))
    if _THROUGHPUT in metrics:
        parts.append(f"{metrics[_THROUGHPUT]:,.0f} tok/s")
    validation = validation_scores(metrics)
    names = _short_names(list(validation))
    parts += [f"val {names[source] + ' ' if len(validation) > 1 else ''}{validation[source]:.3f}" for source in names]
    return "  ".join(parts)


def validation_scores(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """What there is of the mean validation score by data source: `val-core/<data source>/<variable>/mean@<n>`."""
    return {
        key.removeprefix("val-core/").rsplit("/", 2)[0]: value
        for key, value in metrics.items()
        if key.startswith("val-core/") and key.rpartition("/")[2].startswith("mean@")
    }


def _short_names(sources: list[str]) -> dict[str, str]:
    """`openai/gsm8k` is `gsm8k`, where that is still unambiguous."""
    short = {source: source.rpartition("/")[2] for source in sources}
    return short if len(set(short.values())) == len(sources) else {source: source for source in sources}
