"""What came of a sweep: results.json, table.md and report.html, from the metrics that its runs have left."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template

from valor.config.describe import show
from valor.errors import did_you_mean
from valor.lab.statistics import bootstrap_interval, detectable_effect, holm, paired_t_p, sign_flip_p
from valor.lab.sweep_plan import HEADLINE, Run, Sweep
from valor.report.lab_pages import comparison, sweep_page
from valor.report.run_data import Series, as_series, evenly_spaced, read_steps, rounded
from valor.report.skeleton import short
from valor.tracking.console import format_seconds
from valor.tracking.rundir import METRICS_FILE, write_atomically
from valor.trainer.validation import headline

LEVEL = 0.95
# Curves of the page besides the metric itself, where a run has them.
CURVES = {
    "critic/score/mean": "Reward of the training samples",
    "critic/vf_explained_var": "Explained variance of the critic",
    "actor/entropy": "Entropy of the policy",
    "response_length/mean": "Response length",
    "train/loss": "Training loss",
    "val/loss": "Validation loss",
    "val/token_accuracy": "Token accuracy in validation",
}
_TABLE = Path(__file__).with_name("sweep_table.md")
_MAX_POINTS = 200
_TIMES = ("timing_s/step", "timing_s/testing")


def write_results(sweep: Sweep, errors: Mapping[str, str]) -> dict[str, Any]:
    """Compare what has finished, write the three files and return the content of results.json.

    `errors`: what went wrong, by the name of the run. The same runs give the same files, but for their times.
    """
    results = compare(sweep, errors)
    write_atomically(sweep.out / "results.json", json.dumps(results, indent=1) + "\n")
    write_atomically(sweep.out / "table.md", table(results))
    write_atomically(sweep.out / "report.html", sweep_page(results))
    return results


def compare(sweep: Sweep, errors: Mapping[str, str]) -> dict[str, Any]:
    """Every number of the comparison, as JSON values."""
    metric = sweep.metric
    measured = {run.name: _measure(run, metric) for run in sweep.runs if run.finished}
    arms = [_arm(sweep, arm, measured, errors) for arm in sweep.arms]
    _add_differences(arms, sweep.control)
    recorded = {key for measures in measured.values() for key in measures["series"]}
    titles = {metric: metric[:1].upper() + metric[1:]}
    titles |= {key: title for key, title in CURVES.items() if key in recorded}
    return {
        "name": sweep.config.name,
        "entry": sweep.config.entry,
        "metric": metric,
        "control": sweep.control,
        "seeds": sweep.config.seeds,
        "level": LEVEL,
        "differing": list(sweep.differing),
        "arms": arms,
        "curves": [
            {"key": key, "title": title, "arms": {arm: _curve(sweep, arm, key, measured) for arm in sweep.arms}}
            for key, title in titles.items()
        ],
        "notes": _notes(arms, len(sweep.config.seeds)),
    }


def table(results: Mapping[str, Any]) -> str:
    """The comparison as Markdown. It holds no times: the same runs give the same text, to the letter."""
    template = Template(_TABLE.read_text(encoding="utf-8"), trim_blocks=True, keep_trailing_newline=True)
    heads, rows = comparison(results)
    return template.render(results, heads=heads, rows=rows)


def summary(results: Mapping[str, Any], run: Run) -> str:
    """A run that has ended in a line: its number and its time, or what went wrong."""
    arm, seed = next(arm for arm in results["arms"] if arm["name"] == run.arm), str(run.seed)
    if seed in arm["errors"]:
        return arm["errors"][seed]
    measures = arm["finished"][seed]
    return f"{short(measures['last'])}, {format_seconds(measures['seconds'])} of training"


def _measure(run: Run, metric: str) -> dict[str, Any]:
    """Series by name, the metric among them; or `error`, when the run did not measure it."""
    path = run.folder / METRICS_FILE
    if not path.is_file():
        return {"error": f"it left no {METRICS_FILE}: trainer.logger must contain 'file'", "series": {}}
    steps = read_steps(path)
    series, _ = as_series(steps)
    seconds = sum(sum(series[key].finite()) for key in _TIMES if key in series)
    if metric == HEADLINE:
        series[HEADLINE] = _headline(steps)
    curve = series.get(metric)
    if curve is None or not curve.finite():
        hint = did_you_mean(metric, series.keys() - {HEADLINE}, cutoff=0.4) or ": set data.val_files"
        return {"error": f"it measured no {metric}{hint}", "series": series}
    *before, last = curve.finite()
    return {"first": next(iter(before), None), "last": last, "seconds": seconds, "series": series}


def _headline(steps: Mapping[int, Mapping[str, Any]]) -> Series:
    """The validation score by step: the mean of all val-core mean@n."""
    known = ({key: value for key, value in metrics.items() if value is not None} for metrics in steps.values())
    return Series(list(steps), [headline(metrics) for metrics in known])


def _arm(sweep: Sweep, name: str, measured: Mapping[str, Any], errors: Mapping[str, str]) -> dict[str, Any]:
    runs = sweep.of(name)
    good = {run.seed: measured[run.name] for run in runs if run.name in measured and "error" not in measured[run.name]}
    wrong = {**errors} | {run.name: m["error"] for run in runs if "error" in (m := measured.get(run.name, {}))}
    return {
        "name": name,
        "settings": {key: show(runs[0].settings.get(key)) for key in sweep.differing},
        "first": _estimate([first for measures in good.values() if (first := measures["first"]) is not None]),
        "last": _estimate([measures["last"] for measures in good.values()]),
        "finished": {str(seed): {key: good[seed][key] for key in ("first", "last", "seconds")} for seed in good},
        "errors": {str(run.seed): wrong.get(run.name, "not run yet") for run in runs if run.seed not in good},
        "difference": None,
    }


def _add_differences(arms: Sequence[dict[str, Any]], control: str) -> None:
    """Each arm against the control, by the seeds that both have finished; Holm's correction over the arms."""
    base = next(arm for arm in arms if arm["name"] == control)["finished"]
    for arm in arms:
        gaps = [measures["last"] - base[seed]["last"] for seed, measures in arm["finished"].items() if seed in base]
        if arm["name"] != control and gaps:
            p_t = paired_t_p(gaps) if len(gaps) > 2 else None  # two that happen to agree would be called certain
            arm["difference"] = _estimate(gaps) | {"by_seed": gaps, "p_t": p_t, "p_signs": sign_flip_p(gaps)}
            arm["difference"] |= {"p_holm": None, "significant": None}
    tested = [arm["difference"] for arm in arms if arm["difference"] and arm["difference"]["p_t"] is not None]
    for gap, p in zip(tested, holm([gap["p_t"] for gap in tested]), strict=True):
        gap |= {"p_holm": p, "significant": p < 1 - LEVEL}


def _estimate(values: Sequence[float]) -> dict[str, Any]:
    low, high = bootstrap_interval(values, LEVEL) or (None, None)
    return {"mean": math.fsum(values) / len(values) if values else None, "low": low, "high": high}


def _curve(sweep: Sweep, arm: str, key: str, measured: Mapping[str, Any]) -> dict[str, list[Any]] | None:
    """Mean and interval over an arm's seeds at the steps that all of them measured."""
    curves = [curve for run in sweep.of(arm) if (curve := measured.get(run.name, {}).get("series", {}).get(key))]
    if not curves:
        return None
    values = [{s: v for s, v in zip(curve.steps, curve.values, strict=True) if v is not None} for curve in curves]
    steps = evenly_spaced(sorted(set.intersection(*map(set, values))), _MAX_POINTS)
    points = [_estimate([value_at[step] for value_at in values]) for step in steps]
    return {"steps": steps} | {name: [rounded(point[name]) for point in points] for name in ("mean", "low", "high")}


def _notes(arms: Sequence[Mapping[str, Any]], seeds: int) -> list[str]:
    """What this many seeds cannot say."""
    if seeds == 1:
        return ["One seed has no interval, and a difference between single runs can be chance."]
    gaps = {arm["name"]: arm["difference"]["by_seed"] for arm in arms if arm["difference"]}
    effects = ", ".join(f"{name} {e:.2g}" for name, by_seed in gaps.items() if (e := detectable_effect(by_seed)))
    power = f"What these seeds would find in four of five sweeps (t-test at 5 %, before Holm): {effects}."
    sure = 1 - 2.0 ** (1 - seeds)
    return [
        "docs/lab.md says how each number is made. An interval (percentile bootstrap over seeds) holds the true median "
        f"with probability {sure:.2g} at most; p (signs) is at least {1 - sure:.2g}.",
        *([power] if effects else ()),
    ]
