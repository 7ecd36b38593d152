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
_NOTHING = "-"  # where a table has no number
_SIDES = {"right": _BLUE, "wrong": _ORANGE}
# Of a measure its key, title, note, colour, the range of its axis, what chance or the mean alone would have, and the
# fewest answers of either side from which it says anything: of one right answer AUC is 0 or 1.
_MEASURES = (
    (
        "auc",
        "AUC",
        "Chance that a right answer has more value than a wrong one; a coin has 0.5.",
        _BLUE,
        (0.0, 1.05),
        0.5,
        5,
    ),
    (
        "explained_variance",
        "Explained variance",
        "Of the returns by the value; a constant has 0.",
        _ORANGE,
        (-0.1, 1.05),
        0.0,
        0,
    ),
)


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
    interval = f"({results['level']:.0%} interval)"
    heads = ["arm", "seeds", "at the start", f"at the end {interval}", f"against {results['control']} {interval}"]
    rows = [_row(arm, is_control=arm["name"] == results["control"]) for arm in results["arms"]]
    return [*heads, "p (t)", "p (signs)", "Holm", "differs"], rows


def _row(arm: Mapping[str, Any], *, is_control: bool) -> list[str]:
    gap = arm["difference"] or {}
    numbers = [_NOTHING if arm["first"]["mean"] is None else short(arm["first"]["mean"]), with_interval(arm["last"])]
    numbers.append("control" if is_control else with_interval(gap, "+"))
    tests = [_NOTHING if gap.get(key) is None else f"{gap[key]:.2g}" for key in ("p_t", "p_signs", "p_holm")]
    by_seed = gap.get("by_seed", ())  # without a spread there is no t-test
    untested = "too few seeds" if len(by_seed) < 3 else "no spread" if any(by_seed) else "no"
    verdict = {None: untested if gap else _NOTHING, True: "yes", False: "no"}[gap.get("significant")]
    return [arm["name"], str(len(arm["finished"])), *numbers, *tests, verdict]


def with_interval(estimate: Mapping[str, Any] | None, sign: str = "", key: str = "mean") -> str:
    """An estimate as `0.530 (0.500 to 0.570)`, without the brackets where no interval is known; else a dash."""
    if not estimate or estimate[key] is None:
        return _NOTHING
    value, low, high = (short(estimate[end], sign) for end in (key, "low", "high"))
    return value if estimate["low"] is None else f"{value} ({low} to {high})"


def scorecard_page(card: Mapping[str, Any]) -> str:
    """The page's text, from the content of scorecard.json."""
    name, places, turns = model_name(str(card["critic"])), card["positions"], card["turns"]
    shares = [point["at"] for point in places]
    along = _knowledge("along", shares, places, "share of the response written", tickformat=".0%")
    content = [
        section("along", "Right or wrong?", [_separation(places), *along]),
        section("outcome", "Is it honest?", [_calibration(card["calibration"])]),
    ]
    if len(turns) > 1:
        by_turn = [*_knowledge("turns", [turn["turn"] for turn in turns], turns, "turn", dtick=1)]
        content.append(section("turns", "By turn", by_turn))
    if card["monte_carlo"]:
        content.append(section("branches", "Against branch rollouts", [*_branches(card["monte_carlo"])]))
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


def _knowledge(
    name: str, at: Sequence[float], known: Sequence[Mapping[str, Any]], axis: str, **ticks: Any
) -> Iterator[Figure]:
    """AUC, and explained variance, of the value at places or turns: their scales differ, and do not move."""
    for key, title, note, colour, bounds, chance, fewest in _MEASURES:
        values = [point[key] if _few(point) >= fewest else None for point in known]
        if values.count(None) == len(values):
            continue
        lowest = min((value for value in values if value is not None), default=bounds[0])
        y = {"range": [-1.05 if lowest < bounds[0] else bounds[0], bounds[1]]}
        layout = {"yaxis": y, "shapes": [level(chance)], "xaxis": titled(axis, **ticks), "showlegend": False}
        yield figure(f"{name}-{key}", title, note, [points(at, values, title, colour)], layout)


def _few(point: Mapping[str, Any]) -> int:
    """The number of right or of wrong answers at a place, whichever is smaller."""
    return min(point[side]["count"] if point[side] else 0 for side in _SIDES)


def _branches(branches: Mapping[str, Any]) -> Iterator[Figure]:
    scatter = branches["scatter"]
    states = [points(scatter["truth"], scatter["value"], "", _BLUE, mode="markers")]
    layout = {"xaxis": titled("mean return of the branches"), "yaxis": titled("value"), "showlegend": False}
    note = f"Each point a state; its truth is the mean of {branches['branches']} rollouts that start there."
    yield figure("scatter", "Value and truth", note, states, layout | {"shapes": [diagonal(states)]}) | {"wide": True}
    at = [quality["lam"] for quality in branches["lambdas"]]
    lines = [
        points(at, [quality[key] for quality in branches["lambdas"]], key, colour)
        for key, colour in (("correlation", _BLUE), ("slope", _ORANGE))
    ]
    note = "Against true advantages: how alike they are, and how much of a difference arrives on average (1: all)."
    yield figure("lambdas", "Advantages by λ", note, lines, {"xaxis": titled("λ")}) | {"wide": True}


def main_numbers(card: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(name, value, remark) of what a reader wants first, as texts."""
    area, ece = card["auc"], card["calibration"]
    right = round(card["right"] * card["responses"])
    sides = f"{right:,} right and {card['responses'] - right:,} wrong answers"
    yield "AUC", short(area["value"]), f"{_in_95(area)}; {sides}; chance 0.5"
    split = [short(card.get(f"explained_variance_{part}")) for part in ("within", "between")]
    fit = f"of the returns of all policy tokens; {split[0]} within prompts, {split[1]} between them"
    yield "Explained variance", short(card["explained_variance"]), fit
    yield "Calibration error", short(ece["last"]["ece"]), f"at the last token; {short(ece['all']['ece'])} along the way"
    if branches := card["monte_carlo"]:
        order = branches["agreement"]
        ceiling = f"noise of {branches['branches']} branches leaves room for {short(branches['noise_ceiling'])}"
        yield "Correlation with branches", short(branches["correlation"]), ceiling
        p = "" if order["p"] is None else f", p {order['p']:.2g}"
        yield "Order of states right", short(order["mean"]), f"{_in_95(order)}; chance 0.5{p}"
        known = {by["lam"]: by["correlation"] for by in branches["lambdas"] if by["correlation"] is not None}
        if known:
            best = max(known, key=known.__getitem__)
            remark = f"correlation with the true advantages {short(known[best])}; {short(known.get(1.0))} at λ = 1"
            yield "Best λ for one sample", f"{best:g}", remark


def _in_95(estimate: Mapping[str, Any]) -> str:
    low, high = estimate["low"], estimate["high"]
    return "too few for an interval" if low is None else f"95 % {short(low)} to {short(high)}"


def lab_page(content: list[dict[str, Any]], **parts: Any) -> str:
    sections = {part["id"]: part["title"] for part in content}
    return render_page("lab", {"figures": drawn(content)}, sections=sections, content=content, **parts)
