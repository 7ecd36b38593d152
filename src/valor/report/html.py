"""The page's text: header, figures' frames, samples' frame and configuration, all of it escaped."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from pathlib import PurePath
from statistics import median
from typing import Any

from valor.report.run_data import RunData, Series
from valor.tracking.console import format_seconds
from valor.tracking.rundir import METRICS_FILE


def run_name(run: RunData) -> str:
    """The experiment's name, or else the folder's."""
    return str(setting(run.config, "trainer.experiment_name") or run.folder.resolve().name)


def setting(config: dict[str, Any], path: str) -> Any:
    """The value at a dotted path of the configuration; None if there is none."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def header_html(run: RunData, sections: list[tuple[str, str]]) -> str:
    """Name, facts, the numbers to look at first, and links to the sections."""
    facts = "".join(f"<li>{escape(fact)}</li>" for fact in _facts(run))
    tiles = "".join(tile(*one) for one in _tiles(run))
    links = "".join(f'<a href="#{anchor}">{escape(title)}</a>' for anchor, title in sections)
    command = run.info.get("command")
    shown = f'<pre class="command">{escape(str(command))}</pre>' if command else ""
    project = setting(run.config, "trainer.project_name")
    return (
        f'<header><p class="eyebrow">{escape(str(project) if project else "Valor")} · run report</p>'
        f'<h1>{escape(run_name(run))}</h1><ul class="facts">{facts}</ul>{shown}'
        f'<div class="tiles">{tiles}</div></header><nav aria-label="Sections">{links}</nav>'
    )


def panels_html(section: str, title: str, panels: list[dict[str, Any]], before: list[str]) -> str:
    """A section's frames, one per picture, after those given; the script draws into them."""
    frames = list(before)
    here = [one for one in panels if one["section"] == section]
    for place, one in enumerate(here, start=1):
        alone = place == len(here) and place % 2 == 1  # in its row of two
        frames.append(frame(one["id"], one["title"], one["note"], wide=alone))
    return f'<section id="{section}"><h2>{escape(title)}</h2><div class="grid">{"".join(frames)}</div></section>'


def samples_html(run: RunData) -> str:
    """The frame of the sample generations: controls and an empty list, which the script fills."""
    options = "".join(
        f'<option value="{place}">{"validation, " if group.split == "val" else ""}step {group.step}</option>'
        for place, group in enumerate(run.samples)
    )
    return (
        '<section id="samples"><h2>Samples</h2>'
        '<p class="lead">Each token is coloured by what the algorithm made of it; point at one, or tap it, for the'
        ' numbers.</p><div class="controls">'
        f'<label>Generations of <select id="sample-step">{options}</select></label>'
        '<div id="signals" class="segments" role="group" aria-label="Colour tokens by"></div>'
        '<div id="scale" aria-hidden="true"></div></div><p id="sample-note" class="note"></p>'
        '<div id="sample-list"></div></section>'
    )


def config_html(run: RunData) -> str:
    """The resolved configuration as a table with a filter, below what was set on the command line."""
    overrides = run.info.get("overrides") or []
    chosen = "".join(f"<li><code>{escape(str(one))}</code></li>" for one in overrides)
    rows = "".join(
        f"<tr><th scope='row'>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in flatten(run.config)
    )
    head = f'<h3>Set for this run</h3><ul class="overrides">{chosen}</ul>' if chosen else ""
    table = (
        '<label class="filter">Filter <input id="config-filter" type="search" placeholder="lr, rollout.n …"'
        f' autocomplete="off" spellcheck="false"></label><div class="scroll"><table id="config-table"><tbody>{rows}'
        "</tbody></table></div>"
        if rows
        else '<p class="note">The run folder holds no config.yaml.</p>'
    )
    return f'<section id="config"><h2>Configuration</h2>{head}{table}</section>'


def explorer_html() -> str:
    """The frame in which a reader draws any metric of the run."""
    return (
        '<section id="metrics"><h2>Every metric</h2><figure class="panel wide" id="panel-explorer"><figcaption>'
        '<label>Draw <select id="explorer-key"></select></label><ul class="legend"></ul></figcaption>'
        '<div class="plot tall" id="plot-explorer"></div></figure></section>'
    )


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value as one would type it) of every leaf."""
    if isinstance(config, dict) and config:
        for key, value in config.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, _typed(config)


def _typed(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_typed(one) for one in value)}]"
    return str(value)


def frame(id_: str, title: str, note: str, *, wide: bool = False, tall: bool = False) -> str:
    """The place of one picture: heading, note, legend, and the element that the script draws into."""
    return (
        f'<figure class="panel{" wide" if wide else ""}" id="panel-{id_}"><figcaption><h3>{escape(title)}</h3>'
        f'<p>{escape(note)}</p><ul class="legend"></ul></figcaption>'
        f'<div class="plot{" tall" if tall else ""}" id="plot-{id_}"></div></figure>'
    )


def tile(label: str, value: str, detail: str) -> str:
    """One number with its name and a remark."""
    detail = f"<small>{escape(detail)}</small>" if detail else ""
    return f"<div class='tile'><span>{escape(label)}</span><b>{escape(value)}</b>{detail}</div>"


def _facts(run: RunData) -> Iterator[str]:
    """What the run was, in a few words each."""
    if estimator := setting(run.config, "algorithm.adv_estimator"):
        yield str(estimator)
    actor = setting(run.config, "actor_rollout_ref.model.path")
    if actor:
        yield f"actor {PurePath(str(actor)).name}"
    critic = setting(run.config, "critic.model.path")
    if critic and "critic/vf_loss" in run.metrics:
        yield f"critic {PurePath(str(critic)).name}"
    total = run.info.get("total_steps")
    yield f"{run.last_step} of {total} steps" if total else f"{run.last_step} steps"
    if step_seconds := run.metrics.get("timing_s/step"):
        yield f"{format_seconds(sum(step_seconds.finite()))} of training"
    if tokens := run.metrics.get("perf/total_num_tokens"):
        yield f"{_short_count(sum(tokens.finite()))} tokens"
    for key in ("device", "status"):
        if run.info.get(key):
            yield str(run.info[key])
    for package, version in (run.info.get("versions") or {}).items():
        yield f"{package} {version}"
    written = datetime.fromtimestamp((run.folder / METRICS_FILE).stat().st_mtime, tz=UTC)
    yield f"last record {written:%Y-%m-%d %H:%M} UTC"


def _tiles(run: RunData) -> Iterator[tuple[str, str, str]]:
    """(label, value, detail) of the numbers that a reader wants first."""
    for key in sorted(run.metrics):
        if key.startswith("val-core/") and key.rpartition("/")[2].startswith("mean@"):
            source = key.removeprefix("val-core/").rsplit("/", 2)[0].rpartition("/")[2]
            yield from _journey(f"Validation, {source}", run.metrics[key], best=True)
    yield from _journey("Reward", run.first_of("critic/score/mean", "critic/rewards/mean"), window=5)
    yield from _journey("Explained variance", run.metrics.get("critic/vf_explained_var"), window=5)
    yield from _journey("KL to the reference", run.first_of("actor/kl_loss", "actor/reward_kl_penalty"), window=5)
    yield from _journey("Response length", run.metrics.get("response_length/mean"), window=5)
    if (seconds := run.metrics.get("timing_s/step")) and seconds.finite():
        rate = run.metrics.get("perf/throughput")
        speed = f"; {median(rate.finite()):,.0f} tok/s" if rate and rate.finite() else ""
        yield "Seconds per step", format_seconds(median(seconds.finite())), f"median{speed}"


def _journey(
    label: str, series: Series | None, *, window: int = 1, best: bool = False
) -> Iterator[tuple[str, str, str]]:
    """Where a metric ended and where it began, each the median of `window` steps; with `best`, its highest too."""
    numbers = series.finite() if series else []
    if not numbers or series is None:
        return
    window = max(min(window, len(numbers) // 2), 1)
    last, first = median(numbers[-window:]), median(numbers[:window])
    detail = f"from {three(first)}" if len(numbers) > 1 else ""
    if best and max(numbers) > last:
        step = series.steps[series.values.index(max(numbers))]
        detail += f"; best {three(max(numbers))} at step {step}"
    yield label, three(last), detail


def three(value: float, sign: str = "") -> str:
    """About three digits: `0.934`, `1.08`, `95.0`, `1,320`, `0.0012`; with `sign="+"` always a sign."""
    if value != 0 and abs(value) < 0.01:
        return f"{value:{sign}.2g}"
    decimals = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:{sign},.{decimals}f}"


def _short_count(count: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:.0f}"
