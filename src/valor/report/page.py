"""One self-contained page per run: `report.html`, made from the files of the run folder, opens without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from valor.report.histograms import histogram_specs
from valor.report.html import (
    config_html,
    explorer_html,
    frame,
    header_html,
    panels_html,
    run_name,
    samples_html,
)
from valor.report.panels import SECTIONS, panel_specs
from valor.report.run_data import RunData, read_run, rounded, thin
from valor.report.skeleton import render_page
from valor.report.timing import timeline_spec, timing_spec
from valor.tracking.rundir import write_atomically

REPORT_FILE = "report.html"


def build_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path; UserError if the folder holds no metrics.

    The same files give the same page, byte for byte. A metric that the run does not have leaves its picture out.
    """
    run = read_run(run_dir)
    path = run_dir / REPORT_FILE
    write_atomically(path, render(run))
    return path


def render(run: RunData) -> str:
    """The page's text."""
    lines, spreads = panel_specs(run.metrics), histogram_specs(run.histograms)
    panels, timing, timeline = [*lines, *spreads], timing_spec(run.metrics), timeline_spec(run.metrics)
    data = {
        "metrics": _curves(run),
        "panels": lines,
        "spreads": spreads,
        "timing": timing,
        "timeline": timeline,
        "samples": [
            {"step": group.step, "split": group.split, "available": group.available, "records": group.records}
            for group in run.samples
        ],
    }
    present = [
        (section, title)
        for section, title in SECTIONS.items()
        if any(panel["section"] == section for panel in panels) or (section == "time" and timing)
    ]
    more = [("samples", "Samples")] if run.samples else []
    more += [("metrics", "Every metric"), ("config", "Configuration")]
    body = [
        header_html(run, [*present, *more]),
        "<main>",
        *(panels_html(section, title, panels, _clock(section, timing, timeline)) for section, title in present),
        samples_html(run) if run.samples else "",
        explorer_html(),
        config_html(run),
        "</main>",
    ]
    return render_page(run_name(run), body, data, "report")


def _clock(section: str, timing: Any, timeline: Any) -> list[str]:
    """Frames of the two pictures of time, where they belong and there is something to draw."""
    if section != "time":
        return []
    frames = (
        [frame("timing", "Where a step's time goes", "Share of each phase.", wide=True, tall=True)] if timing else []
    )
    if timeline:
        note = f"Step {timeline['step']}. Phases of roles in pools of their own overlap."
        frames.append(frame("timeline", "A step on the clock", note, wide=True))
    return frames


def _curves(run: RunData) -> dict[str, Any]:
    """Every metric as [place of its steps in `steps`, values]; metrics measured at the same steps share them."""
    steps: dict[tuple[int, ...], int] = {}
    curves = {}
    for key, series in sorted(run.metrics.items()):
        thinned = thin(series)
        place = steps.setdefault(tuple(thinned.steps), len(steps))
        curves[key] = [place, [rounded(value) for value in thinned.values]]
    return {"steps": [list(one) for one in steps], "curves": curves}
