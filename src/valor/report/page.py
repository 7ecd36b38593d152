"""One self-contained page per run: `report.html`, made from the files of the run folder, opens without a network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path, PurePath
from statistics import median
from typing import Any

from valor.config.describe import show
from valor.config.tree import flatten, get_at
from valor.report.pictures import SECTIONS, histogram_specs, panel_specs, timing_spec
from valor.report.run_data import RunData, Series, read_run, rounded, thin
from valor.report.skeleton import render_page, short
from valor.tracking.console import format_seconds, validation_scores
from valor.tracking.rundir import METRICS_FILE, write_atomically

REPORT_FILE = "report.html"


def build_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path; UserError if the folder holds no metrics.

    The same files give the same page, byte for byte. A metric that the run does not have leaves its picture out.
    """
    path = run_dir / REPORT_FILE
    write_atomically(path, _render(read_run(run_dir)))
    return path


def _render(run: RunData) -> str:
    """The page's text."""
    lines, spreads = panel_specs(run.metrics), histogram_specs(run.histograms)
    timing = timing_spec(run.metrics)
    pictures = {name: [one for one in (*lines, *spreads) if one["section"] == name] for name in SECTIONS}
    pictures = {name: found for name, found in pictures.items() if found or (name == "time" and timing)}
    sections = {name: SECTIONS[name] for name in pictures} | ({"samples": "Samples"} if run.samples else {})
    heading = str(get_at(run.config, "trainer.experiment_name") or run.folder.resolve().name)
    return render_page(
        "report",
        heading,
        {
            "metrics": _curves(run),
            "panels": lines,
            "spreads": spreads,
            "timing": timing,
            "samples": [asdict(group) for group in run.samples],
        },
        eyebrow=f"{get_at(run.config, 'trainer.project_name') or 'Valor'} · run report",
        heading=heading,
        facts=_facts(run),
        command=run.info.get("command"),
        tiles=_tiles(run),
        sections=sections | {"metrics": "Every metric", "config": "Configuration"},
        pictures=pictures,
        timing=timing,
        samples=run.samples,
        settings=[(key, show(value).strip("'")) for key, value in flatten(run.config).items()],
    )


def _curves(run: RunData) -> dict[str, Any]:
    """Every metric as [place of its steps in `steps`, values]; metrics measured at the same steps share them."""
    steps: dict[tuple[int, ...], int] = {}
    curves = {}
    for key, series in sorted(run.metrics.items()):
        thinned = thin(series)
        place = steps.setdefault(tuple(thinned.steps), len(steps))
        curves[key] = [place, [rounded(value) for value in thinned.values]]
    return {"steps": [list(one) for one in steps], "curves": curves}


def _facts(run: RunData) -> Iterator[str]:
    """What the run was, in a few words each."""
    if estimator := get_at(run.config, "algorithm.adv_estimator"):
        yield str(estimator)
    if actor := get_at(run.config, "actor_rollout_ref.model.path"):
        yield f"actor {PurePath(str(actor)).name}"
    if (critic := get_at(run.config, "critic.model.path")) and "critic/vf_loss" in run.metrics:
        yield f"critic {PurePath(str(critic)).name}"
    yield f"{max(series.steps[-1] for series in run.metrics.values())} steps"
    if step_seconds := run.metrics.get("timing_s/step"):
        yield f"{format_seconds(sum(step_seconds.finite()))} of training"
    if tokens := run.metrics.get("perf/total_num_tokens"):
        yield f"{sum(tokens.finite()):,.0f} tokens"
    for package, version in (run.info.get("versions") or {}).items():
        yield f"{package} {version}"
    written = datetime.fromtimestamp((run.folder / METRICS_FILE).stat().st_mtime, tz=UTC)
    yield f"last record {written:%Y-%m-%d %H:%M} UTC"


def _tiles(run: RunData) -> Iterator[tuple[str, str, str]]:
    """(label, value, detail) of the numbers that a reader wants first."""
    for source, scores in sorted(validation_scores(run.metrics).items()):
        yield from _journey(f"Validation, {source.rpartition('/')[2]}", scores, best=True)
    yield from _journey("Reward", run.first_of("critic/score/mean", "critic/rewards/mean"), window=5)
    yield from _journey("Explained variance", run.metrics.get("critic/vf_explained_var"), window=5)
    yield from _journey("Weight of the critic's baseline", run.metrics.get("critic/gate"))
    yield from _journey("KL to the reference", run.first_of("actor/kl_loss", "actor/reward_kl_penalty"), window=5)
    yield from _journey("Response length", run.metrics.get("response_length/mean"), window=5)
    if (seconds := run.metrics.get("timing_s/step")) and seconds.finite():
        rate = run.metrics.get("perf/throughput")
        speed = f"; {median(rate.finite()):,.0f} tok/s" if rate and rate.finite() else ""
        yield "Seconds per step", format_seconds(median(seconds.finite())), f"median{speed}"


def _journey(
    label: str, series: Series | None, *, window: int = 1, best: bool = False
) -> Iterator[tuple[str, str, str]]:
    """Where a metric ended and where it began, each the median of `window` steps; with `best`, its highest too."""
    numbers = series.finite() if series else []
    if not numbers or series is None:
        return
    window = max(min(window, len(numbers) // 2), 1)
    last, first = median(numbers[-window:]), median(numbers[:window])
    detail = f"from {short(first)}" if len(numbers) > 1 else ""
    if best and max(numbers) > last:
        step = series.steps[series.values.index(max(numbers))]
        detail += f"; best {short(max(numbers))} at step {step}"
    yield label, short(last), detail
