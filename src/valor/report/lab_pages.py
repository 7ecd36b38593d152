"""The pages of the lab.

Of a sweep: arms compared in a table and pictures, how they learn, and in what they differ. Of a critic's scorecard:
does it tell right from wrong, is it calibrated, and where in a response.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from valor.report.pictures import Table, curves_table
from valor.report.skeleton import model_name, render_page, short
from valor.tracking.console import format_seconds


def sweep_page(results: Mapping[str, Any]) -> str:
    """The page's text, from the content of a sweep's results.json."""
    arms = results["arms"]
    finished = [one for arm in arms for one in arm["finished"].values()]
    return render_page(
        "sweep",
        results,
        eyebrow=f"valor {results['entry']} · sweep",
        title=results["name"],
        facts=[
            f"{len(arms)} arms",
            f"seeds {', '.join(map(str, results['seeds']))}",
            f"{len(finished)} of {len(arms) * len(results['seeds'])} runs finished",
            f"control {results['control']}",
            f"{format_seconds(sum(one['seconds'] for one in finished))} of training",
        ],
        sections={"compared": "Compared", "curves": "Learning curves", "differences": "What differs", "runs": "Runs"},
        results=results,
        comparison=comparison(results),
        numbers=[curves_table(_means(one["arms"])) for one in results["curves"]],
        differences=(["arm", *results["differing"]], [[arm["name"], *arm["settings"].values()] for arm in arms]),
        runs=(["arm", "seed", "at the start", "at the end", "training"], list(_runs(results))),
    )


def _means(arms: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    return {name: dict(zip(one["steps"], one["mean"], strict=True)) for name, one in arms.items() if one}


def comparison(results: Mapping[str, Any]) -> Table:
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


def _runs(results: Mapping[str, Any]) -> Iterator[list[str]]:
    for arm in results["arms"]:
        for seed, one in arm["finished"].items():
            yield [arm["name"], seed, short(one["first"]), short(one["last"]), format_seconds(one["seconds"])]
        for seed, error in arm["errors"].items():
            yield [arm["name"], seed, error, "", ""]


def _number(value: float | None, sign: str = "") -> str:
    return "" if value is None else short(value, sign)


def _interval(estimate: Mapping[str, Any], sign: str = "") -> str:
    low, high = _number(estimate.get("low"), sign), _number(estimate.get("high"), sign)
    return f"{low} to {high}" if low else ""


def scorecard_page(card: Mapping[str, Any]) -> str:
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
