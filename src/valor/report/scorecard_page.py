"""The page of a critic's scorecard: does it tell right from wrong, is it calibrated, and where in a response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from valor.report.pictures import Table
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
        f"{name}, scorecard",
        card,
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
        numbers=_tables(card),
    )


def _tables(card: Mapping[str, Any]) -> dict[str, Table]:
    """What the pictures show, by their names."""
    verdicts, places = card["verdicts"], card["positions"]
    width = (verdicts["high"] - verdicts["low"]) / len(verdicts["right"])
    counts = [*zip(verdicts["right"], verdicts["wrong"], strict=True)]
    knowledge = ["AUC", "explained variance"]

    def known(one: Mapping[str, Any]) -> list[str]:
        return [short(one["auc"]), short(one["explained_variance"])]

    def mean(one: Mapping[str, Any], side: str) -> str:
        return short(one[side]["mean"]) if one[side] else ""

    return {
        "verdicts": (
            ["value from", "right", "wrong"],
            [[short(verdicts["low"] + i * width), str(right), str(wrong)] for i, (right, wrong) in enumerate(counts)],
        ),
        "calibration": (
            ["value at the last token", "mean return", "states"],
            [[short(b["value"]), short(b["outcome"]), str(b["count"])] for b in card["calibration"]["last"]["bins"]],
        ),
        "separation": (
            ["written", "right", "wrong"],
            [[f"{one['at']:.0%}", mean(one, "right"), mean(one, "wrong")] for one in places],
        ),
        "along": (["written", *knowledge], [[f"{one['at']:.0%}", *known(one)] for one in places]),
        "turns": (["turn", *knowledge], [[str(one["turn"]), *known(one)] for one in card["turns"]]),
    }


def main_numbers(card: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(name, value, remark) of what a reader wants first, as texts."""
    area = card["auc"]
    yield "AUC", short(area["value"]), f"95 % {short(area['low'])} to {short(area['high'])}; chance 0.5"
    yield "Explained variance", short(card["explained_variance"]), "of the returns of all policy tokens"
    ece = card["calibration"]
    yield "Calibration error", short(ece["last"]["ece"]), f"at the last token; {short(ece['all']['ece'])} along the way"
    if found := card["monte_carlo"]:
        order = found["agreement"]
        ceiling = f"noise of {found['branches']} branches leaves room for {short(found['noise_ceiling'])}"
        yield "Correlation with branches", short(found["correlation"]), ceiling
        p = "" if order["p"] is None else f", p {order['p']:.2g}"
        interval = f"95 % {short(order['low'])} to {short(order['high'])}; chance 0.5{p}"
        yield "Order of states right", short(order["mean"]), interval
