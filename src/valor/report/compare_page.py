"""`valor report --compare A B …`: the curves of several runs in the same pictures, where they end, how they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from valor.config.describe import show
from valor.config.tree import flatten
from valor.errors import UserError
from valor.report.page import heading_of, render_run, tiles_of
from valor.report.pictures import Table, panel_specs
from valor.report.run_data import RunData, read_run
from valor.tracking.rundir import write_atomically


def build_comparison(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write the page to `path` and return it; UserError if a folder holds no metrics, or there is only one."""
    if len({one.resolve() for one in run_dirs}) < 2:
        raise UserError("--compare needs the folders of two runs or more")
    runs: dict[str, RunData] = {}
    for folder in run_dirs:
        run = read_run(folder)
        name = heading_of(run)
        runs[name if name not in runs else f"{name} ({folder})"] = run
    metrics = {f"{key} · {name}": one for name, run in runs.items() for key, one in run.metrics.items()}
    page = render_run(
        "compare",
        RunData(path, metrics, config={}, info={}, samples=[], histograms={}, findings=[]),
        _panels(runs),
        ("Where they end", "What differs"),
        title=" and ".join(runs) if len(runs) == 2 else f"{len(runs)} runs",
        eyebrow="Valor · runs compared",
        facts=[f"{name}: {max(one.steps[-1] for one in run.metrics.values())} steps" for name, run in runs.items()],
        ends=_ends(runs),
        findings=[(name, one) for name, run in runs.items() for one in run.findings],
        differing=_differing(runs),
    )
    write_atomically(path, page)
    return path


def _panels(runs: Mapping[str, RunData]) -> list[dict[str, Any]]:
    """Each panel that a run has, with its first line from every run."""
    panels: dict[str, dict[str, Any]] = {}
    for place, (name, run) in enumerate(runs.items(), start=1):
        for panel in panel_specs(run.metrics):
            first = panel["lines"][0]
            line = first | {"label": name, "key": f"{first['key']} · {name}", "color": place, "style": "solid"}
            panels.setdefault(panel["id"], panel | {"lines": []})["lines"].append(line)
    return [*panels.values()]


def _ends(runs: Mapping[str, RunData]) -> Table:
    """The tiles of every run as a table."""
    tiles = {name: {label: f"{value} ({more})" for label, value, more in tiles_of(run)} for name, run in runs.items()}
    heads = list(dict.fromkeys(label for found in tiles.values() for label in found))
    return ["run", *heads], [[name, *(found.get(head, "") for head in heads)] for name, found in tiles.items()]


def _differing(runs: Mapping[str, RunData]) -> Table:
    """The settings that are not the same in all runs."""
    flat = [{key: show(value).strip("'") for key, value in flatten(run.config).items()} for run in runs.values()]
    keys = sorted({key for one in flat for key in one})
    rows = [[key, *(one.get(key, "") for one in flat)] for key in keys]
    return ["key", *runs], [row for row in rows if len({*row[1:]}) > 1]
