"""Figures of a report: curves (assets/panels.yaml lists them), spreads over steps, and times."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import yaml

from valor.report.figures import Figure, Table, as_text, band, curves_table, figure, level, points, titled
from valor.report.run_data import MAX_POINTS, Series, StepHistogram, evenly_spaced, rounded
from valor.report.skeleton import asset, short
from valor.tracking.metrics import Histogram

_CONTENT: dict[str, Any] = yaml.safe_load(asset("panels.yaml"))
SECTIONS: dict[str, str] = _CONTENT["sections"]
_PHASES: dict[str, str] = _CONTENT["phases"]
_AFTER_THE_STEP = ("testing", "save_checkpoint")
_MAX_BARS = 120


def panels(metrics: Mapping[str, Series]) -> Iterator[Figure]:
    """The panels that this run has data for; the curves stay in the page's metrics."""
    reward, *others = _CONTENT["panels"]
    for panel in [reward, *_validation_panels(metrics), *others]:
        lines: dict[str, dict[str, Any]] = {}  # by metric
        for index, (label, line) in enumerate(panel["lines"].items(), start=1):
            look = {"label": label, "style": "solid", "colour": f"--c{(index - 1) % 12 + 1}"}
            look |= {"keys": [line]} if isinstance(line, str) else line
            key = next((key for key in look["keys"] if key in metrics and metrics[key].finite()), None)
            is_double = "unless_same" in look and any(metrics[key] == metrics[other] for other in lines if key)
            if key is not None and not is_double:
                lines[key] = look
        if lines and panel.get("needs", next(iter(lines))) in metrics:
            series = {key: metrics[key] for key in lines}
            traces = [trace for key, line in lines.items() for trace in _traces(panel, line, key, series[key])]
            curves = {lines[key]["label"]: dict(zip(s.steps, s.values, strict=True)) for key, s in series.items()}
            table = curves_table(curves, panel.get("unit", ""))
            layout = _layout(panel, list(series.values()))
            shown = figure(panel["id"], panel["title"], panel["note"], traces, layout, table)
            yield shown | {"section": panel["section"]}


def _traces(panel: Mapping[str, Any], line: Mapping[str, Any], key: str, series: Series) -> Iterator[dict[str, Any]]:
    """A metric's curve, named with its last value; of a long noisy one, faint, with a trend over it."""
    unit, colour, style = panel.get("unit", ""), line["colour"], line["style"]
    few = panel.get("markers") or len(series.steps) < 3
    has_trend = panel.get("smooth", True) and len(series.steps) >= 40 and not few and style != "faint"
    faint = (0.2 if style == "dash" else 0.32) if has_trend else 0.45 if style == "faint" else 1
    common = {"curve": key, "legendgroup": key}
    look = {"color": colour, "width": 1.2 if has_trend else 2, "dash": "5px,4px" if style == "dash" else "solid"}
    hover = f"{line['label']}: %{{y{':.1%' if unit == '%' else ':.4~g'}}}<extra></extra>"
    name = f"{line['label']} {as_text(series.finite()[-1], unit)}"
    mode = {"mode": "lines+markers" if few else "lines", "marker": {"size": 6, "color": colour}, "opacity": faint}
    yield {**common, **mode, "name": name, "showlegend": not has_trend, "line": look, "hovertemplate": hover}
    if has_trend:
        trend = {"trend": True, "mode": "lines", "hoverinfo": "skip", "name": name}
        yield {**common, **trend, "line": look | {"width": 2.2}}


def _step_axis(first: int, last: int) -> dict[str, Any]:
    x = titled("step")
    if last - first <= 6:
        x["dtick"] = 1  # no step 1.2
    if last == first:
        x["range"] = [first - 0.6, last + 0.6]
    return x


def _layout(panel: Mapping[str, Any], curves: list[Series]) -> dict[str, Any]:
    values = [value for series in curves for value in series.finite()]
    first, last = min(series.steps[0] for series in curves), max(series.steps[-1] for series in curves)
    x, y = _step_axis(first, last), {}
    if len({*values}) == 1:  # not an axis around one number
        y["range"] = [min(0.0, 1.1 * values[0]), max(0.0, 1.1 * values[0]) or 1]
    if panel.get("unit") == "%":
        y["tickformat"] = ".1%" if max(values) < 0.05 else ".0%"
    levels = panel.get("levels", [])
    if panel.get("log") and max(values) > 0:
        y |= {"type": "log", "dtick": 1, "nticks": 0}
    elif bounds := panel.get("bounds"):
        least = min(*values, *levels, bounds[1])
        y["range"] = [bounds[0] if least < bounds[0] else least - 0.05, bounds[1]]
    return {"xaxis": x, "yaxis": y, "hovermode": "x unified", "shapes": [level(at) for at in levels]}


def metrics_table(metrics: Mapping[str, Series]) -> Table:
    """Every metric: where it began and ended, and its extremes."""
    values = {key: series.finite() for key, series in sorted(metrics.items()) if series.finite()}
    rows = [[key, *map(short, (of[0], of[-1], min(of), max(of)))] for key, of in values.items()]
    return ["metric", "first", "last", "lowest", "highest"], rows


def _validation_panels(metrics: Mapping[str, Series]) -> list[dict[str, Any]]:
    """Mean accuracy per data source, and what several samples of a prompt reach together."""
    parts = {key: key.split("/", 1)[1].rsplit("/", 2) for key in sorted(metrics) if key.startswith("val-core/")}
    several_sources = len({source for source, *_ in parts.values()}) > 1
    lines: dict[bool, dict[str, str]] = {True: {}, False: {}}
    for key, (source, *_, statistic) in parts.items():
        label = f"{source.rpartition('/')[2]} {statistic}" if several_sources else statistic
        lines[statistic.startswith("mean@")][label] = key
    shared = {"section": "learning", "markers": True}
    once, several = "Mean score on held-out prompts.", "Held-out prompts with several samples each."
    return [
        {"id": "validation", "title": "Validation", "note": once, "lines": lines[True], **shared},
        {"id": "validation-n", "title": "Validation, several tries", "note": several, "lines": lines[False], **shared},
    ]


def spreads(histograms: Mapping[str, list[StepHistogram]]) -> Iterator[Figure]:
    """Median, and the band that holds four fifths, of the tokens of each step. Returns are shown beside values only."""
    for name, about in _CONTENT["spreads"].items():
        recorded = histograms.get(f"critic/{name}/histogram")
        if recorded and (name != "returns" or "critic/values/histogram" in histograms):
            steps, spreads = zip(*evenly_spaced(recorded, MAX_POINTS), strict=True)
            low, middle, high = (list(ends) for ends in zip(*map(_quantiles, spreads), strict=True))
            lines = [band(steps, low, high, "--c1"), points(steps, middle, "median", "--c1", mode="lines")]
            layout = {"xaxis": _step_axis(steps[0], steps[-1])}
            shown = figure(f"{name}-spread", f"Spread of the {name}", about["note"], lines, layout)
            yield shown | {"section": about["section"]}


def _quantiles(spread: Histogram) -> list[float]:
    """The first tenth, the median and the last tenth; entries lie evenly in their bins."""
    reached = np.concatenate([[0.0], np.cumsum(spread.counts)]) / sum(spread.counts)
    return [float(f"{value:.4g}") for value in np.interp([0.1, 0.5, 0.9], reached, spread.edges)]


def timing(metrics: Mapping[str, Series]) -> Iterator[Figure]:
    """Shares of each phase in bars, a step each; nothing if the run did not time its steps.

    Seconds in which phases overlap count for the one that began first. The rest of the step is the phase "other";
    validation and saving come after the step.
    """
    total = metrics.get("timing_s/step", Series([], []))
    steps = [step for step, seconds in zip(total.steps, total.values, strict=True) if seconds]
    names = sorted({key.removeprefix("timing_s/") for key in metrics if key.startswith("timing_s/")} - {"step"})
    if not names or not steps:
        return

    def of_steps(key: str) -> np.ndarray:
        series = metrics.get(key, Series([], []))
        by_step = dict(zip(series.steps, series.values, strict=True))
        return np.array([by_step.get(step) or 0.0 for step in steps])

    seconds = {name: of_steps(f"timing_s/{name}") - of_steps(f"timing_hidden_s/{name}") for name in names}
    within = [array for name, array in seconds.items() if name not in _AFTER_THE_STEP]
    seconds["other"] = of_steps("timing_s/step") - sum(within)
    shown = evenly_spaced(range(len(steps)), _MAX_BARS)
    totals = {
        name: float(seconds[name].clip(0.0).sum()) for name in sorted(seconds, key=[*_PHASES, *names, "other"].index)
    }
    totals = {name: total for name, total in totals.items() if total}
    labels = {name: _PHASES.get(name, name.replace("_", " ")) for name in totals}
    shares = {name: f"{total / sum(totals.values()):.1%}" for name, total in totals.items()}
    x = [str(steps[i]) for i in shown]
    heights = {name: [rounded(float(seconds[name][i])) for i in shown] for name in totals}
    traces = [
        {"type": "bar", "x": x, "y": heights[name], "customdata": heights[name], "name": f"{label} {shares[name]}"}
        | {"marker": {"color": "--c12" if label == "other" else f"--c{i % 11 + 1}", "line": {"width": 0}}}
        | {"hovertemplate": f"step %{{x}}<br>{label}: %{{customdata:.3~g}} s, %{{y:.0f}}%<extra></extra>"}
        for i, (name, label) in enumerate(labels.items())
    ]
    axis = titled("step", type="category", showgrid=False, nticks=12, tickangle=0)
    layout = {"barmode": "stack", "barnorm": "percent", "bargap": 0 if len(x) > 60 else 0.12, "height": 290}
    layout |= {"xaxis": axis, "yaxis": {"ticksuffix": "%", "range": [0, 100]}}
    table = ["phase", "seconds", "share"], [[labels[name], short(totals[name]), shares[name]] for name in totals]
    bars = figure("timing", "Where a step's time goes", "Share of each phase.", traces, layout, table)
    yield bars | {"section": "time", "wide": True}
