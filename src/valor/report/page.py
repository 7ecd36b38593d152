"""The self-contained page of a run, `report.html`, made from the files of its folder."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from valor.config.describe import show
from valor.config.tree import flatten, get_at
from valor.report import pictures
from valor.report.figures import drawn, section
from valor.report.run_data import RunData, Series, read_run, rounded, thin
from valor.report.samples import sample_groups, signals
from valor.report.skeleton import model_name, render_page, short
from valor.tracking.console import format_seconds, validation_scores
from valor.tracking.diagnosis import RULES, WINDOW
from valor.tracking.rundir import METRICS_FILE, write_atomically

REPORT_FILE = "report.html"


def build_report(run_dir: Path, *, live: bool = False) -> Path:
    """Write `run_dir/report.html` and return its path; UserError if the folder holds no metrics.

    `live`: the run goes on, and the page looks for a newer one now and then. The same files give the same page, byte
    for byte. A metric that the run does not have leaves its picture out.
    """
    run = read_run(run_dir)
    figures = [*pictures.panels(run.metrics), *pictures.spreads(run.histograms), *pictures.timing(run.metrics)]
    by_section = {name: [shown for shown in figures if shown["section"] == name] for name in pictures.SECTIONS}
    content = [section(name, pictures.SECTIONS[name], shown) for name, shown in by_section.items() if shown]
    sections = {"findings": "What stands out", **{part["id"]: part["title"] for part in content}}
    sections |= {"samples": "Samples"} if run.samples else {}
    settings = [[key, show(value).strip("'")] for key, value in flatten(run.config).items()]
    groups = sample_groups(run.samples)
    page = render_page(
        "report",
        {"figures": drawn(content), "metrics": _curves(run.metrics), "live": live},
        title=_heading(run),
        eyebrow=f"{get_at(run.config, 'trainer.project_name') or 'Valor'} · run report",
        facts=[*_facts(run), *(["the run goes on: this page renews itself"] if live else [])],
        command=run.info.get("command"),
        tiles=[*tiles_of(run)],
        findings=run.findings,
        num_rules=len(RULES),
        window=WINDOW,
        early=num_steps(run) < WINDOW,
        sections=sections | ({"metrics": "Every metric"} if run.metrics else {}) | {"config": "Configuration"},
        content=content,
        groups=groups,
        about=run.info.get("about"),
        opening=_opening(run.samples),
        signals=signals(groups),
        metrics_table=pictures.metrics_table(run.metrics),
        config=section("config", "Configuration", table=(["key", "value"], settings)),
    )
    write_atomically(run_dir / REPORT_FILE, page)
    return run_dir / REPORT_FILE


def _curves(metrics: Mapping[str, Series]) -> dict[str, Any]:
    """Every metric as [index of its steps in `steps`, values]; metrics measured at the same steps share them."""
    steps: dict[tuple[int, ...], int] = {}
    curves = {}
    for key, series in sorted(metrics.items()):
        thinned = thin(series)
        index = steps.setdefault(tuple(thinned.steps), len(steps))
        curves[key] = [index, [rounded(value) for value in thinned.values]]
    return {"steps": [list(numbers) for numbers in steps], "curves": curves}


def _heading(run: RunData) -> str:
    """The run's name; of a run without one, its folder's."""
    name, folder = get_at(run.config, "trainer.experiment_name"), run.folder.resolve()
    return str(name) if name not in (None, "run") else f"{folder.parent.name}/{folder.name}"


def _opening(samples: list[dict[str, Any]]) -> int:
    """The samples to show first: the last of training with different rewards, else the last of training."""
    differ = [len({record["reward"] for record in group["records"]}) > 1 for group in samples]
    return max(range(len(samples)), key=lambda i: (samples[i]["split"] == "train", differ[i], i), default=0)


def num_steps(run: RunData) -> int:
    """The last step that has metrics."""
    return max((series.steps[-1] for series in run.metrics.values()), default=0)


def _facts(run: RunData) -> Iterator[str]:
    """What the run was, in a few words each."""
    if estimator := get_at(run.config, "algorithm.adv_estimator"):
        yield str(estimator)
    if actor := get_at(run.config, "actor_rollout_ref.model.path"):
        yield f"actor {model_name(str(actor))}"
    if get_at(run.config, "critic.kind") == "probe" and "critic/vf_loss" in run.metrics:
        yield "critic in closed form"
    elif (critic := get_at(run.config, "critic.model.path")) and "critic/vf_loss" in run.metrics:
        yield f"critic {model_name(str(critic))}"
    yield f"{num_steps(run)} steps"
    if step_seconds := run.metrics.get("timing_s/step"):
        yield f"{format_seconds(sum(step_seconds.finite()))} of training"
    if tokens := run.metrics.get("perf/total_num_tokens"):
        yield f"{sum(tokens.finite()):,.0f} tokens"
    for package, version in (run.info.get("versions") or {}).items():
        yield f"{package} {version}"
    written = datetime.fromtimestamp((run.folder / METRICS_FILE).stat().st_mtime, tz=UTC)
    yield f"last record {written:%Y-%m-%d %H:%M} UTC"


def tiles_of(run: RunData) -> Iterator[tuple[str, str, str]]:
    """(label, value, detail) of the numbers that a reader wants first."""
    for source, scores in sorted(validation_scores(run.metrics).items()):
        yield from _journey(f"Validation, {source.rpartition('/')[2]}", scores, best=True)
    yield from _journey("Reward", run.first_of("critic/score/mean", "critic/rewards/mean"), best=True)
    yield from _journey("Explained variance", run.metrics.get("critic/vf_explained_var"), best=True)
    yield from _journey("Weight of the critic's baseline", run.metrics.get("critic/gate"))
    yield from _journey("KL to the reference", run.first_of("actor/kl_loss", "actor/reward_kl_penalty"))
    yield from _journey("Response length", run.metrics.get("response_length/mean"))
    if (seconds := run.metrics.get("timing_s/step")) and seconds.finite():
        rate = run.metrics.get("perf/throughput")
        speed = f"; {median(rate.finite()):,.0f} tok/s" if rate and rate.finite() else ""
        yield "Seconds per step", format_seconds(median(seconds.finite())), f"median{speed}"


def _journey(label: str, series: Series | None, *, best: bool = False) -> Iterator[tuple[str, str, str]]:
    """Where a metric ended (the number beside its curve) and where it began; with `best`, its highest too."""
    numbers = series.finite() if series else []
    if not numbers or series is None:
        return
    detail = f"from {short(numbers[0])}" if len(numbers) > 1 else ""
    if best and max(numbers) > numbers[-1]:
        step = series.steps[series.values.index(max(numbers))]
        detail += f"; best {short(max(numbers))} at step {step}"
    yield label, short(numbers[-1]), detail
