"""The curves of a report: assets/panels.yaml says which metrics each picture draws, and what to look for in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from valor.report.run_data import Series
from valor.report.skeleton import asset

_CONTENT: dict[str, Any] = yaml.safe_load(asset("panels.yaml"))
SECTIONS: dict[str, str] = _CONTENT["sections"]
_PLAIN = {"unit": "", "log": False, "bounds": None, "levels": [], "markers": False, "smooth": True}


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
            lines.append({"label": line["label"], "key": key, **look})
        if lines:
            specs.append(_PLAIN | panel | {"lines": lines})
    return specs


def _validation_panels(metrics: Mapping[str, Series]) -> list[dict[str, Any]]:
    """Mean accuracy per data source, and what several samples of a prompt reach together."""
    keys = sorted(key for key in metrics if key.startswith("val-core/"))
    sources = {key: key.removeprefix("val-core/").rsplit("/", 2)[0] for key in keys}
    means: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for key, source in sources.items():
        statistic = key.rpartition("/")[2]
        label = f"{source.rpartition('/')[2]} {statistic}" if len(set(sources.values())) > 1 else statistic
        (means if statistic.startswith("mean@") else others).append({"label": label, "keys": [key]})
    shared = {"section": "learning", "markers": True}
    once, several = "Mean score on held-out prompts.", "Held-out prompts with several samples each."
    return [
        {"id": "validation", "title": "Validation", "note": once, "lines": means, **shared},
        {"id": "validation-n", "title": "Validation, several tries", "note": several, "lines": others, **shared},
    ]
