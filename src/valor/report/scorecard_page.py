"""The page of a critic's scorecard: does it tell right from wrong, is it calibrated, and where in a response."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from valor.report.skeleton import model_name, render_page, short


def render(card: Mapping[str, Any]) -> str:
    """The page's text, from the content of scorecard.json."""
    name = model_name(str(card["critic"]))
    sections = {"outcome": "Right or wrong?", "along": "Along the response"}
    if len(card["turns"]) > 1:
        sections["turns"] = "By turn"
    if card["monte_carlo"]:
        sections["branches"] = "Against branch rollouts"
    return render_page(
        "scorecard",
        card,
        title=f"{name}, scorecard",
        eyebrow="Valor · critic scorecard",
        heading=name,
        facts=[
            f"{card['responses']} answers to {card['prompts']} prompts, {card['right']:.1%} right",
            f"policy {model_name(str(card['policy']))} at temperature {card['temperature']:g}",
            f"gamma {card['gamma']:g}",
            f"seed {card['seed']}",
        ],
        command=str(card["command"]),
        tiles=main_numbers(card),
        sections=sections,
        card=card,
        numbers=_numbers(card),
    )


def _numbers(card: Mapping[str, Any]) -> dict[str, tuple[Sequence[str], list[list[str]]]]:
    """What the pictures show, as heads and rows of tables."""
    verdicts, places = card["verdicts"], card["positions"]
    sides, knows = ("right", "wrong"), ("AUC", "explained variance")
    edges = np.linspace(verdicts["low"], verdicts["high"], len(verdicts["right"]) + 1)
    bars = zip(edges, edges[1:], verdicts["right"], verdicts["wrong"], strict=False)
    bins = [(name, one) for name in ("last", "all") for one in card["calibration"][name]["bins"]]

    def band(one: Mapping[str, float] | None) -> str:
        return f"{short(one['mean'])} ({short(one['low'])} to {short(one['high'])})" if one else "none"

    def known(one: Mapping[str, Any]) -> list[str]:
        return [short(one["auc"]), short(one["explained_variance"])]

    return {
        "verdicts": (("value", *sides), [[f"{short(a)} to {short(b)}", *map(str, n)] for a, b, *n in bars if any(n)]),
        "calibration": (
            ("tokens", "value", "mean return", "states"),
            [[name, short(one["value"]), short(one["outcome"]), str(one["count"])] for name, one in bins],
        ),
        "separation": (
            ("written", *sides),
            [[f"{one['at']:.0%}", *(band(one[side]) for side in sides)] for one in places],
        ),
        "along": (("written", *knows), [[f"{one['at']:.0%}", *known(one)] for one in places]),
        "turns": (("turn", *knows), [[str(one["turn"]), *known(one)] for one in card["turns"]]),
    }


def main_numbers(card: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(name, value, remark) of what a reader wants first, as texts."""
    area = card["auc"]
    yield "AUC", short(area["value"]), f"95 % {short(area['low'])} to {short(area['high'])}; chance 0.5"
    yield "Explained variance", short(card["explained_variance"]), "of the returns of all policy tokens"
    ece = card["calibration"]
    yield "Calibration error", short(ece["last"]["ece"]), f"at the last token; {short(ece['all']['ece'])} along the way"
    if found := card.get("distribution"):
        error = f"of its mean {short(found['abs_error'])}; of P(return <= c) off by {short(found['calibration_error'])}"
        yield "CRPS of the distribution", short(found["crps"]), error
    if found := card["monte_carlo"]:
        order = found["agreement"]
        ceiling = f"noise of {found['branches']} branches leaves room for {short(found['noise_ceiling'])}"
        yield "Correlation with branches", short(found["correlation"]), ceiling
        p = "" if order["p"] is None else f", p {order['p']:.2g}"
        interval = f"95 % {short(order['low'])} to {short(order['high'])}; chance 0.5{p}"
        yield "Order of states right", short(order["mean"]), interval
