"""Sections and figures of a page: traces and layouts as Plotly takes them, drawn by assets/charts.js.

Colours are names of the style sheet (`--c1`), with an opacity in hexadecimal where one is wanted (`--c1~29`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from valor.report.run_data import evenly_spaced
from valor.report.skeleton import short

Figure = dict[str, Any]
Table = tuple[list[str], list[list[str]]]  # heads, rows
_TABLE_ROWS = 16
_GUIDE = {"type": "line", "layer": "below", "line": {"color": "--soft", "width": 1, "dash": "2px,3px"}}


def section(
    name: str, title: str, figures: Sequence[Figure] = (), table: Table | None = None, notes: Sequence[str] = ()
) -> dict[str, Any]:
    return {"id": name, "title": title, "figures": figures, "table": table, "notes": notes}


def figure(
    name: str, title: str, note: str, traces: list[Any], layout: Mapping[str, Any], numbers: Table | None = None
) -> Figure:
    """A figure, with its numbers as a table: those of its named traces, unless others are given."""
    if numbers is None:
        curves = {
            trace["name"]: dict(zip(trace["x"], trace["y"], strict=True)) for trace in traces if trace.get("name")
        }
        numbers = curves_table(curves) if curves else None
    texts = {"id": name, "title": title, "note": note, "numbers": numbers, "wide": False}
    return {**texts, "traces": traces, "layout": layout}


def drawn(content: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the script needs of the figures of these sections."""
    return [{key: shown[key] for key in ("id", "traces", "layout")} for part in content for shown in part["figures"]]


def points(x: Sequence[Any], y: Sequence[Any], name: str, colour: str, **more: Any) -> dict[str, Any]:
    line, marker = {"color": colour, "width": 2}, {"size": 5, "color": colour}
    hover = {"hovertemplate": "%{x:.4~g}, %{y:.4~g}"}
    return {"x": x, "y": y, "name": name, "mode": "lines+markers", "line": line, "marker": marker, **hover, **more}


def band(x: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str) -> dict[str, Any]:
    ends = {"x": [*x, *reversed(x)], "y": [*high, *reversed(low)], "line": {"width": 0}, "mode": "lines"}
    return {**ends, "fill": "toself", "fillcolor": f"{colour}~29", "hoverinfo": "skip", "showlegend": False}


def level(y: float) -> dict[str, Any]:
    """A horizontal line across the figure."""
    return {**_GUIDE, "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y}


def diagonal(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ends = [value for trace in traces for value in (*trace["x"], *trace["y"])]
    return {**_GUIDE, "x0": min(ends), "x1": max(ends), "y0": min(ends), "y1": max(ends)}


def titled(text: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": text, "standoff": 6}, **more}


def curves_table(curves: Mapping[str, Mapping[Any, float | None]], unit: str = "") -> Table:
    """Curves, each {x: value}, at some of their x, the first and the last among them; x is a step or a number."""
    shown = evenly_spaced(sorted(set().union(*curves.values())), _TABLE_ROWS)
    heads = [str(x) if isinstance(x, int) else f"{x:.3g}" for x in shown]
    texts = [[as_text(curve[x], unit) if x in curve else "" for curve in curves.values()] for x in shown]
    return ["x", *curves], [[head, *row] for head, row in zip(heads, texts, strict=True)]


def as_text(value: float | None, unit: str = "") -> str:
    return f"{value:.1%}" if unit == "%" and value is not None else short(value)
