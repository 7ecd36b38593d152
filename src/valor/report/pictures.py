"""Pictures of a report: curves (assets/panels.yaml lists them), histograms over steps, and times."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import yaml

from valor.report.run_data import Series, StepHistogram, evenly_spaced, rounded
from valor.report.skeleton import asset, short
from valor.tracking.metrics import Histogram

_CONTENT: dict[str, Any] = yaml.safe_load(asset("panels.yaml"))
SECTIONS: dict[str, str] = _CONTENT["sections"]
_PLAIN = {"unit": "", "log": False, "bounds": None, "levels": [], "markers": False, "smooth": True}
_NUM_ROWS = 40  # common bins of a spread
_MAX_COLUMNS = 160  # steps of a spread
_TAIL = 0.005  # of all tokens, at either end: they are counted in the outermost bins, so that the rest is seen
_PHASES: dict[str, str] = _CONTENT["phases"]
_AFTER_THE_STEP = ("testing", "save_checkpoint")
_MAX_BARS = 120
_TABLE_ROWS = 16
Table = tuple[list[str], list[list[str]]]  # heads, rows


def panel_specs(metrics: Mapping[str, Series]) -> list[dict[str, Any]]:
    """The panels that this run has data for, as the page's script reads them; the curves stay in the metrics."""
    reward, *others = _CONTENT["panels"]
    specs = []
    for panel in [reward, *_validation_panels(metrics), *others]:
        lines = []
        for place, line in enumerate(panel["lines"], start=1):
            key = next((key for key in line["keys"] if key in metrics and metrics[key].finite()), None)
            if key is None or ("unless_same" in line and any(metrics[key] == metrics[one["key"]] for one in lines)):
                continue
            look = {"style": line.get("style", "solid"), "color": line.get("color", place)}
            last = _as_text(metrics[key].finite()[-1], panel.get("unit", ""))
            lines.append({"label": line["label"], "key": key, "last": last, **look})
        if lines and panel.get("needs", lines[0]["key"]) in metrics:
            specs.append(_PLAIN | panel | {"lines": lines})
    return specs


def panel_table(panel: Mapping[str, Any], metrics: Mapping[str, Series]) -> Table:
    """The numbers of a panel's lines."""
    series = {line["label"]: metrics[line["key"]] for line in panel["lines"]}
    curves = {label: dict(zip(one.steps, one.values, strict=True)) for label, one in series.items()}
    return curves_table(curves, panel["unit"])


def curves_table(curves: Mapping[str, Mapping[Any, float | None]], unit: str = "") -> Table:
    """Curves, each {x: value}, at some of their x, the first and the last among them; x is a step or a number."""
    steps = evenly_spaced(sorted(set().union(*curves.values())), _TABLE_ROWS)
    rows = [
        [
            str(i) if isinstance(i, int) else f"{i:.3g}",
            *(_as_text(one[i], unit) if i in one else "" for one in curves.values()),
        ]
        for i in steps
    ]
    return ["step", *curves], rows


def metrics_table(metrics: Mapping[str, Series]) -> Table:
    """Every metric: where it began and ended, and its extremes."""
    values = {key: series.finite() for key, series in sorted(metrics.items()) if series.finite()}
    rows = [[key, *map(short, (of[0], of[-1], min(of), max(of)))] for key, of in values.items()]
    return ["metric", "first", "last", "lowest", "highest"], rows


def spread_table(spread: Mapping[str, Any]) -> Table:
    """Mean and standard deviation of a spread at some of its steps."""
    rows, shares = np.array(spread["rows"]), np.array(spread["shares"])
    mean = rows @ shares / shares.sum(0)
    deviation = np.sqrt(np.maximum(rows**2 @ shares / shares.sum(0) - mean**2, 0.0))
    shown = evenly_spaced([*zip(spread["steps"], mean, deviation, strict=True)], _TABLE_ROWS)
    return ["step", "mean", "standard deviation"], [[str(step), short(m), short(d)] for step, m, d in shown]


def timing_table(timing: Mapping[str, Any]) -> Table:
    """Seconds and share of each phase in the whole run."""
    sums = {phase["label"]: sum(phase["seconds"]) for phase in timing["phases"]}
    return ["phase", "seconds", "share"], [[k, short(v), f"{v / sum(sums.values()):.1%}"] for k, v in sums.items()]


def _as_text(value: float | None, unit: str) -> str:
    return f"{value:.1%}" if unit == "%" and value is not None else short(value)


def _validation_panels(metrics: Mapping[str, Series]) -> list[dict[str, Any]]:
    """Mean accuracy per data source, and what several samples of a prompt reach together."""
    parts = {key: key.split("/", 1)[1].rsplit("/", 2) for key in sorted(metrics) if key.startswith("val-core/")}
    several_sources = len({source for source, *_ in parts.values()}) > 1
    lines: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for key, (source, *_, statistic) in parts.items():
        label = f"{source.rpartition('/')[2]} {statistic}" if several_sources else statistic
        lines[statistic.startswith("mean@")].append({"label": label, "keys": [key]})
    shared = {"section": "learning", "markers": True}
    once, several = "Mean score on held-out prompts.", "Held-out prompts with several samples each."
    return [
        {"id": "validation", "title": "Validation", "note": once, "lines": lines[True], **shared},
        {"id": "validation-n", "title": "Validation, several tries", "note": several, "lines": lines[False], **shared},
    ]


def histogram_specs(histograms: Mapping[str, list[StepHistogram]]) -> list[dict[str, Any]]:
    """The pictures that the run has data for: `steps`, bin centres `rows`, and `shares` [row][step].

    Returns are shown beside values only.
    """
    specs = []
    for name, about in _CONTENT["spreads"].items():
        recorded = histograms.get(f"critic/{name}/histogram")
        if not recorded or (name == "returns" and "critic/values/histogram" not in histograms):
            continue
        shown = evenly_spaced(recorded, _MAX_COLUMNS)
        edges = np.linspace(*_ends([one for _, one in shown]), _NUM_ROWS + 1)
        columns = {
            "steps": [step for step, _ in shown],
            "rows": [float(f"{row:.4g}") for row in (edges[:-1] + edges[1:]) / 2],
            "shares": np.round(np.stack([_shares(one, edges) for _, one in shown], axis=1), 4).tolist(),
        }
        specs.append({"id": f"{name}-spread", "title": f"Spread of the {name}", **about, **columns})
    return specs


def _ends(spreads: list[Histogram]) -> tuple[float, float]:
    """Where the run's entries begin and end, but for their tails."""
    centres = np.concatenate([one.centres for one in spreads])
    counts = np.concatenate([one.counts for one in spreads]).astype(float)
    order = np.argsort(centres)
    reached = np.cumsum(counts[order]) / counts.sum()
    low, high = (float(centres[order][np.searchsorted(reached, at)]) for at in (_TAIL, 1 - _TAIL))
    room = 0.02 * (high - low) or 0.5
    return low - room, high + room


def _shares(one: Histogram, edges: np.ndarray) -> np.ndarray:
    """The step's share of entries in each of the common bins; its own bins are spread evenly over what they cover."""
    reached = np.concatenate([[0.0], np.cumsum(one.counts)]) / sum(one.counts)
    inner = np.interp(edges[1:-1], one.edges, reached)
    return np.diff(np.concatenate([[0.0], inner, [1.0]]))


def timing_spec(metrics: Mapping[str, Series]) -> dict[str, Any] | None:
    """Seconds of each phase per step, in bars of equally many steps; None if the run did not time its steps.

    Seconds in which phases overlap count for the one that began first. The rest of the step is the phase "other";
    validation and saving come after the step.
    """
    whole = metrics.get("timing_s/step", Series([], []))
    steps = [step for step, total in zip(whole.steps, whole.values, strict=True) if total]
    names = sorted({key.removeprefix("timing_s/") for key in metrics if key.startswith("timing_s/")} - {"step"})
    if not names or not steps:
        return None

    def of_steps(key: str) -> np.ndarray:
        series = metrics.get(key, Series([], []))
        by_step = dict(zip(series.steps, series.values, strict=True))
        return np.array([by_step.get(step) or 0.0 for step in steps])

    seconds = {name: of_steps(f"timing_s/{name}") - of_steps(f"timing_hidden_s/{name}") for name in names}
    within = [one for name, one in seconds.items() if name not in _AFTER_THE_STEP]
    seconds["other"] = of_steps("timing_s/step") - sum(within)
    per_bar = -(-len(steps) // _MAX_BARS)
    bars = [steps[i : i + per_bar] for i in range(0, len(steps), per_bar)]
    phases = []
    for name in [one for one in _PHASES if one in seconds] + [one for one in seconds if one not in _PHASES]:
        sums = np.add.reduceat(seconds[name].clip(0.0), range(0, len(steps), per_bar))
        if sums.any():
            label = _PHASES.get(name, name.replace("_", " "))
            phases.append({"label": label, "seconds": [rounded(one) for one in sums]})
    return {"bars": [f"{bar[0]}" if len(bar) == 1 else f"{bar[0]}-{bar[-1]}" for bar in bars], "phases": phases}
