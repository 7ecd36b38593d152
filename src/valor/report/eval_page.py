"""The page of an evaluation: each policy's metrics by data source with intervals, and each policy against the first."""

from collections.abc import Mapping, Sequence
from typing import Any

from valor.report.figures import Figure, Table, figure, points, section
from valor.report.lab_pages import lab_page, with_interval

_NOTES = (
    "Intervals are 95 % percentile bootstraps over prompts, as if other prompts of the kind had been drawn; where all "
    "prompts agree they have no width, which is no certainty.",
    "pass@k is the unbiased estimate from all answers to a prompt (Chen et al. 2021); maj@n the score of the most "
    "frequent answer.",
    "errors: answers that could not be graded, which count as wrong with reward.error_score.",
)
_COMPARED = (
    "Mean over prompts of the difference of their mean scores; the interval is a bootstrap over prompts. p: two-sided "
    "permutation test that flips the signs of the prompts' differences.",
)


def eval_page(results: Mapping[str, Any]) -> str:
    """The page's text, from the content of eval.json."""
    sources = list(dict.fromkeys(source for policy in results["policies"] for source in policy["sources"]))
    figures = [_metrics(f"metrics-{i}", source, results["policies"]) for i, source in enumerate(sources)]
    content = [section("metrics", "Metrics", figures, metric_table(results), _NOTES)]
    if results["comparisons"]:
        content.append(section("compared", "Compared", (), comparison_table(results), _COMPARED))
    return lab_page(
        content,
        eyebrow="Valor · evaluation",
        title=", ".join(policy["name"] for policy in results["policies"]),
        facts=[
            f"{results['samples']} answer{'s' * (results['samples'] > 1)} to each prompt "
            f"at temperature {results['temperature']:g}",
            ", ".join(results["data"]),
            f"seed {results['seed']}",
        ],
        command=results["command"],
    )


def metric_table(results: Mapping[str, Any]) -> Table:
    """A row for each policy and data source."""
    measured = [source for policy in results["policies"] for source in policy["sources"].values()]
    names = list(dict.fromkeys(name for source in measured for name in source["metrics"]))
    rows = [
        [
            policy["name"],
            source,
            f"{of['prompts']:,}",
            *(with_interval(of["metrics"].get(name), key="value") for name in names),
            f"{of['tokens']:,.0f}",
            f"{of['cut']:.1%}",
            f"{of['errors']:,}",
        ]
        for policy in results["policies"]
        for source, of in policy["sources"].items()
    ]
    return ["policy", "source", "prompts", *names, "tokens", "cut", "errors"], rows


def comparison_table(results: Mapping[str, Any]) -> Table:
    """A row for each policy but the first, and each data source."""
    heads = ["policy", "against", "source", "metric", "difference", "better", "worse", "prompts", "p"]
    rows = [
        [
            *(gap[key] for key in ("other", "base", "source", "metric")),
            with_interval(gap, "+", "value"),
            *(f"{gap[key]:,}" for key in ("better", "worse", "prompts")),
            f"{gap['p_signs']:.2g}",
        ]
        for gap in results["comparisons"]
    ]
    return heads, rows


def _metrics(name: str, source: str, policies: Sequence[Mapping[str, Any]]) -> Figure:
    """The metrics of one data source, a colour for each policy, with their intervals."""
    by_policy = [policy["sources"].get(source, {"metrics": {}})["metrics"] for policy in policies]
    traces = []
    for i, (policy, metrics) in enumerate(zip(policies, by_policy, strict=True)):
        values = [of["value"] for of in metrics.values()]
        low, high = (
            [0.0 if of[end] is None else abs(of[end] - of["value"]) for of in metrics.values()]
            for end in ("low", "high")
        )
        colour = f"--c{i % 12 + 1}"
        bars = {"type": "data", "symmetric": False, "array": high, "arrayminus": low, "color": colour}
        traces.append(points(list(metrics), values, policy["name"], colour, mode="markers") | {"error_y": bars})
    names = list(dict.fromkeys(name for metrics in by_policy for name in metrics))
    rows = [[name, *(with_interval(metrics.get(name), key="value") for metrics in by_policy)] for name in names]
    numbers = ["metric", *(policy["name"] for policy in policies)], rows
    layout = {"scattermode": "group", "xaxis": {"type": "category"}, "yaxis": {"rangemode": "tozero"}, "height": 280}
    return figure(name, source, "Means over prompts with their 95 % intervals.", traces, layout, numbers)
