"""The page of a critic's scorecard: does it tell right from wrong, is it calibrated, and where in a response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import PurePath
from typing import Any

from valor.report.html import frame, three, tile
from valor.report.skeleton import render_page


def render(card: Mapping[str, Any]) -> str:
    """The page's text, from the content of scorecard.json."""
    name = PurePath(str(card["critic"])).name
    tiles = "".join(tile(*one) for one in _tiles(card))
    sections = {anchor: (title, frames) for anchor, title, frames in _sections(card)}
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, (title, _) in sections.items())
    body = [
        f'<header><p class="eyebrow">Valor · critic scorecard</p><h1>{escape(name)}</h1>'
        f'<ul class="facts">{"".join(f"<li>{escape(fact)}</li>" for fact in _facts(card))}</ul>'
        f'<pre class="command">{escape(str(card["command"]))}</pre><div class="tiles">{tiles}</div></header>'
        f'<nav aria-label="Sections">{links}</nav><main>',
        *(
            f'<section id="{anchor}"><h2>{title}</h2><div class="grid">{frames}</div></section>'
            for anchor, (title, frames) in sections.items()
        ),
        "</main>",
    ]
    return render_page(f"{name}, scorecard", body, card, "scorecard")


def _facts(card: Mapping[str, Any]) -> Iterator[str]:
    yield f"{card['responses']} answers to {card['prompts']} prompts, {card['right']:.1%} right"
    yield f"policy {PurePath(str(card['policy'])).name} at temperature {card['temperature']:g}"
    yield f"gamma {card['gamma']:g}"
    yield f"seed {card['seed']}"


def _tiles(card: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    area, threshold = card["auc"], card["threshold"]
    yield "AUC", _number(area["value"]), f"95 % {_number(area['low'])} to {_number(area['high'])}; chance 0.5"
    at = f" at V \u2265 {three(threshold)}" if threshold is not None else ""
    yield "Accuracy", three(card["accuracy"]), f"best threshold{at}; always the same: {three(card['majority'])}"
    yield "Explained variance", _number(card["explained_variance"]), "of the returns of all policy tokens"
    ece = card["calibration"]
    yield "Calibration error", three(ece["last"]["ece"]), f"at the last token; {three(ece['all']['ece'])} along the way"
    if found := card["monte_carlo"]:
        order = found["agreement"]
        ceiling = f"noise of {found['branches']} branches leaves room for {_number(found['noise_ceiling'])}"
        yield "Correlation with branches", _number(found["correlation"]), ceiling
        p = "" if order["p"] is None else f", p {order['p']:.2g}"
        interval = f"95 % {_number(order['low'])} to {_number(order['high'])}; chance 0.5{p}"
        yield "Order of states right", _number(order["mean"]), interval


def _sections(card: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(anchor, title, frames) of what this card has."""
    yield (
        "outcome",
        "Right or wrong?",
        frame("verdicts", "Verdicts", "Value at the last token of right and of wrong answers.")
        + frame(
            "calibration",
            "Calibration",
            "Mean return where the critic said so; a tenth of the states in each point. On the diagonal it is honest.",
        ),
    )
    yield (
        "along",
        "Along the response",
        frame("separation", "Separation", "Mean value of right and of wrong answers; half of them lie in the band.")
        + frame("along-auc", "When does it know?", "AUC and explained variance of the value at each place."),
    )
    if len(card["turns"]) > 1:
        yield (
            "turns",
            "By turn",
            frame("turns", "After each turn", "AUC and explained variance of the value at its last token.", wide=True),
        )
    if found := card["monte_carlo"]:
        note = f"Each point a state; its truth is the mean of {found['branches']} rollouts that start there."
        rated = found["agreement"]["responses"]
        order = (
            f"Share of a response's pairs of states that the critic orders as the branches do; {rated} of "
            f"{found['responses']} responses have states that differ. Right of the line: better than chance."
        )
        yield (
            "branches",
            "Against branch rollouts",
            frame("scatter", "Value and truth", note) + frame("order", "Does it rank steps?", order),
        )


def _number(value: float | None) -> str:
    return "none" if value is None else three(value)
