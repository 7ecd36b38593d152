"""The console's one line per step, and the table of all metrics for who wants it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from valor.tracking.console import format_number, format_seconds, say
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


class ConsoleLogger:
    """Prints `summary_line` of each step, and with `wide` every metric under it."""

    def __init__(self, total_steps: int | None = None, *, wide: bool = False) -> None:
        self._total_steps, self._wide = total_steps, wide

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        """Print the step without its histograms; above the progress bars while they are shown."""
        say(summary_line(step, metrics, self._total_steps))
        if self._wide:
            say(wide_table(metrics))

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


def wide_table(metrics: Mapping[str, float]) -> str:
    """Every metric, one a line, sorted by name."""
    width = max(map(len, metrics), default=0)
    return "\n".join(f"  {key:<{width}}  {format_number(metrics[key])}" for key in sorted(metrics))


def validation_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """Mean validation score per data source, from `val-core/<data source>/<variable>/mean@<n>`."""
    scores = {}
    for key, value in metrics.items():
        if key.startswith("val-core/") and key.rpartition("/")[2].startswith("mean@"):
            scores[key.removeprefix("val-core/").rsplit("/", 2)[0]] = value
    return scores


def _short_names(sources: list[str]) -> dict[str, str]:
    """`openai/gsm8k` is `gsm8k`, where that is still unambiguous."""
    short = {source: source.rpartition("/")[2] for source in sources}
    return short if len(set(short.values())) == len(sources) else {source: source for source in sources}
