"""The pages of the lab: sections of figures and tables.

Of a sweep: arms compared in a table and pictures, how they learn, and in what they differ. Of a critic's scorecard:
does it tell right from wrong, is it calibrated, and where in a response.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from valor.report.figures import Figure, Table, band, diagonal, drawn, figure, level, points, section, titled
from valor.report.skeleton import model_name, render_page, short
from valor.tracking.console import format_seconds

_MOST_AT_FIRST = 8  # arms whose curves are shown before the reader chooses in the legend
_BLUE, _ORANGE = "--c1", "--c2"
_SIDES = {"right": _BLUE, "wrong": _ORANGE}


def sweep_page(results: Mapping[str, Any]) -> str:
    """The page's text, from the content of a sweep's results.json."""
    arms = results["arms"]
    finished = [run for arm in arms for run in arm["finished"].values()]
    errors = [f"{arm['name']} seed {seed}: {error}" for arm in arms for seed, error in arm["errors"].items()]
    heads, rows = ["arm", *results["differing"]], [[arm["name"], *arm["settings"].values()] for arm in arms]
    curves = [_curves(f"curve-{i}", curve, results) for i, curve in enumerate(results["curves"])]
    return lab_page(
        [
            section("compared", "Compared", table=comparison(results), notes=[*results["notes"], *errors]),
            section("curves", "Learning curves", curves, notes=["Mean over seeds; the band is its interval."]),
            section("differences", "What differs", table=(heads, rows)),
        ],
        eyebrow=f"valor {results['entry']} · sweep",
        title=results["name"],
        facts=[
            f"{len(arms)} arms",
            f"seeds {', '.join(map(str, results['seeds']))}",
            f"{len(finished)} of {len(arms) * len(results['seeds'])} runs finished",
            f"control {results['control']}",
            f"{format_seconds(sum(run['seconds'] for run in finished))} of training",
        ],
    )


def _curves(name: str, curve: Mapping[str, Any], results: Mapping[str, Any]) -> Figure:
    """Means of the arms over steps, with bands where their intervals are known."""
    traces: list[Any] = []
    for i, arm in enumerate(results["arms"]):
        series, colour = curve["arms"][arm["name"]], f"--c{i % 12 + 1}"
        if series:
            shown = {"legendgroup": arm["name"], "visible": True if i < _MOST_AT_FIRST else "legendonly"}
            if None not in (*series["low"], *series["high"]):
                traces.append(band(series["steps"], series["low"], series["high"], colour) | shown)
            dash = {"color": colour, "width": 2, "dash": "solid" if i < 12 else "5px,4px"}
            traces.append(points(series["steps"], series["mean"], arm["name"], colour, line=dash) | shown)
    layout = {"hovermode": "x unified", "xaxis": titled("step"), "height": 300}
    note = curve["key"] if curve["key"] != results["metric"] else ""
    return figure(name, curve["title"], note, traces, layout) | {"wide": True}


def comparison(results: Mapping[str, Any]) -> Table:
    """Column titles and a row of texts per arm: where it started and ended, and how far that is from the control."""
    interval = f"{results['level']:.0%} interval"
    heads = ["arm", "seeds", "at the start", "at the end", interval, f"against {results['control']}", interval]
    return [*heads, "p (t)", "p (signs)", "Holm", "differs"], [_row(arm) for arm in results["arms"]]


def _row(arm: Mapping[str, Any]) -> list[str]:
    gap = arm["difference"] or {}
    numbers = [_number(arm["first"]["mean"]), _number(arm["last"]["mean"]), _interval(arm["last"])]
    numbers += [_number(gap.get("mean"), "+"), _interval(gap, "+")]
    tests = ["" if gap.get(key) is None else f"{gap[key]:.2g}" for key in ("p_t", "p_signs", "p_holm")]
    verdict = {None: "", True: "yes", False: "no"}[gap.get("significant")]
    return [arm["name"], str(len(arm["finished"])), *numbers, *tests, verdict]


def _number(value: float | None, sign: str = "") -> str:
    return "" if value is None else short(value, sign)


def _interval(estimate: Mapping[str, Any], sign: str = "") -> str:
    low, high = _number(estimate.get("low"), sign), _number(estimate.get("high"), sign)
    return f"{low} to {high}" if low else ""


def scorecard_page(card: Mapping[str, Any]) -> str:
    """The page's text, from the content of scorecard.json."""
    name, places, turns = model_name(str(card["critic"])), card["positions"], card["turns"]
    along = _knowledge("along-auc", "When does it know?", [point["at"] for point in places], places, "share written")
    content = [
        section("along", "Right or wrong?", [_separation(places), along]),
        section("outcome", "Is it honest?", [_calibration(card["calibration"])]),
    ]
    if len(turns) > 1:
        by_turn = _knowledge("turns", "After each turn", [turn["turn"] for turn in turns], turns, "turn")
        content.append(section("turns", "By turn", [by_turn]))
    if card["monte_carlo"]:
        content.append(section("branches", "Against branch rollouts", [_branches(card["monte_carlo"])]))
    return lab_page(
        content,
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
    )


def _calibration(calibration: Mapping[str, Any]) -> Figure:
    names = {"last": ("at the last token", _BLUE), "all": ("along the response", _ORANGE)}
    bins = {key: calibration[key]["bins"] for key in names}
    traces = [
        points([of["value"] for of in bins[key]], [of["outcome"] for of in bins[key]], name, colour)
        | {"customdata": [of["count"] for of in bins[key]], "hovertemplate": "%{x:.3~g}, %{y:.3~g}: %{customdata}"}
        for key, (name, colour) in names.items()
    ]
    layout = {"xaxis": titled("value"), "yaxis": titled("mean return"), "shapes": [diagonal(traces)]}
    note = "Mean return where the critic said so; a tenth of the states in each point. On the diagonal it is honest."
    return figure("calibration", "Calibration", note, traces, layout)


def _separation(places: Sequence[Mapping[str, Any]]) -> Figure:
    traces = []
    for side, colour in _SIDES.items():
        if spreads := {point["at"]: point[side] for point in places if point[side]}:
            low, mean, high = ([spread[key] for spread in spreads.values()] for key in ("low", "mean", "high"))
            traces += [band([*spreads], low, high, colour), points([*spreads], mean, side, colour)]
    layout = {"hovermode": "x unified", "xaxis": titled("share of the response written", tickformat=".0%")}
    note = "Mean value of right and of wrong answers; half of them lie in the band."
    return figure("separation", "Separation", note, traces, layout)


def _knowledge(name: str, title: str, at: Sequence[float], known: Sequence[Mapping[str, Any]], axis: str) -> Figure:
    """AUC and explained variance of the value, over places or turns."""
    keys = {"auc": ("AUC", _BLUE), "explained_variance": ("explained variance", _ORANGE)}
    traces = [points(at, [point[key] for point in known], label, colour) for key, (label, colour) in keys.items()]
    layout = {"xaxis": titled(axis), "shapes": [level(0.5)]}
    return figure(name, title, "AUC and explained variance of the value there.", traces, layout)


def _branches(branches: Mapping[str, Any]) -> Figure:
    scatter = branches["scatter"]
    states = [points(scatter["truth"], scatter["value"], "", _BLUE, mode="markers")]
    layout = {"xaxis": titled("mean return of the branches"), "yaxis": titled("value"), "showlegend": False}
    note = f"Each point a state; its truth is the mean of {branches['branches']} rollouts that start there."
    return figure("scatter", "Value and truth", note, states, layout | {"shapes": [diagonal(states)]}) | {"wide": True}


def main_numbers(card: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(name, value, remark) of what a reader wants first, as texts."""
    area, ece = card["auc"], card["calibration"]
    yield "AUC", short(area["value"]), f"95 % {short(area['low'])} to {short(area['high'])}; chance 0.5"
    split = [short(card.get(f"explained_variance_{part}")) for part in ("within", "between")]
    fit = f"of the returns of all policy tokens; {split[0]} within prompts, {split[1]} between them"
    yield "Explained variance", short(card["explained_variance"]), fit
    yield "Calibration error", short(ece["last"]["ece"]), f"at the last token; {short(ece['all']['ece'])} along the way"
    if fit := card.get("distribution"):
        error = f"of its mean {short(fit['abs_error'])}; of P(return <= c) off by {short(fit['calibration_error'])}"
        yield "CRPS of the distribution", short(fit["crps"]), error
    if branches := card["monte_carlo"]:
        order = branches["agreement"]
        ceiling = f"noise of {branches['branches']} branches leaves room for {short(branches['noise_ceiling'])}"
        yield "Correlation with branches", short(branches["correlation"]), ceiling
        p = "" if order["p"] is None else f", p {order['p']:.2g}"
        interval = f"95 % {short(order['low'])} to {short(order['high'])}; chance 0.5{p}"
        yield "Order of states right", short(order["mean"]), interval


def lab_page(content: list[dict[str, Any]], **parts: Any) -> str:
    sections = {part["id"]: part["title"] for part in content}
    return render_page("lab", {"figures": drawn(content)}, sections=sections, content=content, **parts)
