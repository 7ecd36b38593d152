"""The page of a sweep: arms compared in a table and pictures, how they learn, and in what they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from valor.report.html import frame, three
from valor.report.skeleton import render_page
from valor.tracking.console import format_seconds

SECTIONS = {"compared": "Compared", "curves": "Learning curves", "differences": "What differs", "runs": "Runs"}


def render(results: Mapping[str, Any]) -> str:
    """The page's text, from the content of a sweep's results.json."""
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title in SECTIONS.items())
    arms = results["arms"]
    settings = ([arm["name"], *arm["settings"].values()] for arm in arms)
    body = [
        f'<header><p class="eyebrow">valor {escape(results["entry"])} · sweep</p><h1>{escape(results["name"])}</h1>'
        f'<ul class="facts">{"".join(f"<li>{escape(fact)}</li>" for fact in _facts(results))}</ul></header>',
        f'<nav aria-label="Sections">{links}</nav><main>',
        _section("compared", _comparison(results)),
        _section("curves", _curves(results)),
        _section("differences", _table(["arm", *results["differing"]], settings)),
        _section("runs", _table(["arm", "seed", "at the start", "at the end", "training"], _run_rows(arms))),
        "</main>",
    ]
    return render_page(results["name"], body, results, "sweep")


def _facts(results: Mapping[str, Any]) -> Iterable[str]:
    arms = results["arms"]
    finished = [one for arm in arms for one in arm["finished"].values()]
    yield f"{len(arms)} arms"
    yield f"seeds {', '.join(map(str, results['seeds']))}"
    yield f"{len(finished)} of {len(arms) * len(results['seeds'])} runs finished"
    yield f"control {results['control']}"
    yield f"{format_seconds(sum(one['seconds'] for one in finished))} of training"


def comparison(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Column titles and a row of texts per arm: where it started and ended, and how far that is from the control."""
    level = f"{results['level']:.0%} interval"
    heads = ["arm", "seeds", "at the start", "at the end", level, f"against {results['control']}", level]
    return [*heads, "p (t)", "p (signs)", "Holm", "differs"], [_row(arm) for arm in results["arms"]]


def _row(arm: Mapping[str, Any]) -> list[str]:
    gap = arm["difference"] or {}
    numbers = [_number(arm["first"]["mean"]), _number(arm["last"]["mean"]), _interval(arm["last"])]
    numbers += [_number(gap.get("mean"), "+"), _interval(gap, "+")]
    tests = ["" if gap.get(key) is None else f"{gap[key]:.2g}" for key in ("p_t", "p_signs", "p_holm")]
    verdict = {None: "", True: "yes", False: "no"}[gap.get("significant")]
    return [arm["name"], str(len(arm["finished"])), *numbers, *tests, verdict]


def _comparison(results: Mapping[str, Any]) -> str:
    level = f"{results['level']:.0%} interval"
    pictures = frame("last", f"At the end: {results['metric']}", f"Each seed, their mean and its {level}.")
    note = f"By seed, their mean and its {level}; full where it differs."
    pictures += frame("gap", f"Difference from {results['control']}", note)
    notes = "".join(f"<li>{escape(note)}</li>" for note in results["notes"])
    return f'<div class="grid">{pictures}</div>{_table(*comparison(results))}<ul class="notes">{notes}</ul>'


def _curves(results: Mapping[str, Any]) -> str:
    lead = "Mean over seeds; the band is its interval. Choose arms:"
    frames = [
        frame(f"curve-{place}", one["title"], one["key"] if one["key"] != results["metric"] else "", wide=place == 0)
        for place, one in enumerate(results["curves"])
    ]
    return f'<p class="lead">{lead}</p><div id="arms" class="chips"></div><div class="grid">{"".join(frames)}</div>'


def _run_rows(arms: Iterable[Mapping[str, Any]]) -> Iterable[list[str]]:
    for arm in arms:
        for seed, one in arm["finished"].items():
            yield [arm["name"], seed, _number(one["first"]), _number(one["last"]), format_seconds(one["seconds"])]
        for seed, error in arm["errors"].items():
            yield [arm["name"], seed, error, "", ""]


def _section(anchor: str, content: str) -> str:
    return f'<section id="{anchor}"><h2>{SECTIONS[anchor]}</h2>{content}</section>'


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table that scrolls sideways below its first column."""
    lines = "".join(
        f"<tr><th scope='row'>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    titles = "".join(f"<th scope='col'>{escape(head)}</th>" for head in heads)
    return (
        f'<div class="scroll"><table class="data"><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


def _number(value: float | None, sign: str = "") -> str:
    return "" if value is None else three(value, sign)


def _interval(estimate: Mapping[str, Any], sign: str = "") -> str:
    low, high = _number(estimate.get("low"), sign), _number(estimate.get("high"), sign)
    return f"{low} to {high}" if low else ""
