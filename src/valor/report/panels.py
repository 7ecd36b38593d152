"""The pictures of a report: which metrics each one draws, and what a reader should look for in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from valor.report.run_data import Series


@dataclass(frozen=True)
class Line:
    """One curve. `key`: the metric that it shows; a run without it may have `other` in its place."""

    label: str
    key: str
    style: str = "solid"  # solid | dash | faint
    color: int = 0  # place in the page's palette, from 1; 0: by position
    unless_same: bool = False  # leave it out where it equals a curve above it
    other: str = ""


@dataclass(frozen=True)
class Panel:
    """One picture. `unit`: "" or "%"; `bounds`: the widest range the axis may take; `markers`: few points."""

    id: str
    section: str
    title: str
    note: str
    lines: tuple[Line, ...]
    unit: str = ""
    log: bool = False
    bounds: tuple[float, float] | None = None
    levels: tuple[float, ...] = ()  # horizontal guide lines
    markers: bool = False
    smooth: bool = True  # a noisy metric: draw its trend over it


SECTIONS = {
    "learning": "Is it learning?",
    "critic": "The critic",
    "policy": "The policy",
    "rollout": "Rollouts",
    "time": "Time",
}


def _panel(place: str, title: str, note: str, *lines: Line, **options: Any) -> Panel:
    """`place`: section and id."""
    section, _, name = place.partition("/")
    return Panel(name, section, title, note, lines, **options)


def _peak(label: str, call: str, style: str = "solid") -> Line:
    """Peak memory of a call on a role: on the device, else in the process."""
    return Line(label, f"perf/max_memory_allocated_gb/{call}", style, other=f"perf/peak_rss_gb/{call}")


PANELS = (
    _panel(
        "learning/reward",
        "Reward",
        "Mean score of a step's responses; after shaping (KL, masks) where that differs.",
        Line("score", "critic/score/mean"),
        Line("after shaping", "critic/rewards/mean", "dash", unless_same=True),
    ),
    _panel(
        "learning/missing",
        "Trajectories without reward",
        "Share whose reward was taken away.",
        Line("missing", "reward/missing_ratio"),
        unit="%",
    ),
    _panel(
        "critic/explained-variance",
        "Explained variance",
        "1 is a perfect critic, 0 one that only knows the mean, and below 0 it misleads. The axis stops at -1.",
        Line("explained variance", "critic/vf_explained_var"),
        Line("prompts held out", "critic/holdout/vf_explained_var", color=2),
        bounds=(-1.0, 1.05),
        levels=(0.0, 1.0),
    ),
    _panel(
        "critic/holdout-auc",
        "Right told from wrong",
        "On the prompts held out: how often the value at the end of a right answer is above that of a wrong one.",
        Line("AUC", "critic/holdout/auc"),
        bounds=(0.0, 1.02),
        levels=(0.5, 1.0),
        markers=True,
    ),
    _panel(
        "critic/value-loss",
        "Value loss",
        "What the critic's optimizer sees.",
        Line("value loss", "critic/vf_loss"),
    ),
    _panel(
        "critic/values-returns",
        "Values and returns",
        "A calibrated critic's mean value lies on the mean return.",
        Line("values", "critic/values/mean"),
        Line("returns", "critic/returns/mean", "dash"),
    ),
    _panel(
        "critic/value-error",
        "Value error along the response",
        "Mean |value - return| in each fifth. A critic that learns from the end sees the last fifth right first.",
        Line("first fifth", "critic/vf_abs_error/fifth_1"),
        Line("middle", "critic/vf_abs_error/fifth_3"),
        Line("last fifth", "critic/vf_abs_error/fifth_5"),
    ),
    _panel(
        "critic/ensemble",
        "Disagreement of the critics",
        "Standard deviation over the ensemble.",
        Line("standard deviation", "critic/ensemble_std"),
    ),
    _panel(
        "critic/critic-grad-norm",
        "Critic gradient norm",
        "Before clipping.",
        Line("gradient norm", "critic/grad_norm"),
    ),
    _panel(
        "policy/kl",
        "KL to the reference",
        "How far the policy has moved from where it began, per token.",
        Line("in the loss", "actor/kl_loss"),
        Line("in the reward", "actor/reward_kl_penalty", "dash"),
    ),
    _panel(
        "policy/policy-loss",
        "Policy loss",
        "Clipped surrogate: its level says little, its spikes a lot.",
        Line("policy loss", "actor/pg_loss"),
        levels=(0.0,),
    ),
    _panel(
        "policy/entropy",
        "Entropy",
        "Nats per token. A fast fall to zero means that exploration has ended.",
        Line("entropy", "actor/entropy", other="actor/entropy_loss"),
    ),
    _panel(
        "policy/actor-grad-norm",
        "Actor gradient norm",
        "Before clipping. A gap is a step that was skipped for a non-finite gradient.",
        Line("gradient norm", "actor/grad_norm"),
    ),
    _panel(
        "policy/clipping",
        "Clipped tokens",
        "Share of tokens whose ratio or value met its clip range.",
        Line("policy", "actor/pg_clipfrac"),
        Line("policy, dual clip", "actor/pg_clipfrac_lower", "dash"),
        Line("value", "critic/vf_clipfrac", color=2),
        unit="%",
    ),
    _panel(
        "policy/learning-rate",
        "Learning rate",
        "After warm-up and schedule.",
        Line("actor", "actor/lr"),
        Line("critic", "critic/lr", color=2),
        log=True,
        smooth=False,
    ),
    _panel(
        "rollout/response-length",
        "Response length",
        "Tokens per response.",
        Line("mean", "response_length/mean"),
        Line("longest", "response_length/max", "faint"),
        Line("shortest", "response_length/min", "faint", color=3),
    ),
    _panel(
        "rollout/truncation",
        "Cut at the limit",
        "Share of responses that ran into the length limit.",
        Line("cut", "response_length/clip_ratio"),
        unit="%",
    ),
    _panel(
        "rollout/rollout-gap",
        "Rollout against training",
        "How far generation and training disagree about the tokens drawn. It should be rounding noise.",
        Line("log-prob, mean", "training/rollout_log_probs_diff_mean"),
        Line("log-prob, largest", "training/rollout_log_probs_diff_max", "faint", color=1),
        Line("probability, mean", "training/rollout_probs_diff_mean", color=2),
        log=True,
    ),
    _panel(
        "time/step-seconds",
        "Seconds per step",
        "Wall clock of the training step, without validation and saving.",
        Line("seconds", "timing_s/step", other="perf/time_per_step"),
    ),
    _panel(
        "time/throughput",
        "Throughput",
        "Tokens per second and device, prompts included.",
        Line("tokens/s", "perf/throughput"),
    ),
    _panel(
        "time/memory",
        "Memory",
        "Peak of the fullest process in each phase, GiB: device memory on CUDA, resident memory on a CPU.",
        _peak("actor update", "actor.update"),
        _peak("critic update", "critic.update"),
        _peak("generation", "rollout.generate", "dash"),
        _peak("old log-probs", "actor.compute_log_probs", "faint"),
    ),
    _panel(
        "time/out-of-memory",
        "Out of memory",
        "Micro-batches that did not fit and were repeated in smaller ones: the gradient is the same, time is lost.",
        Line("actor, repeats an update", "actor/oom_retries", other="train/oom_retries"),
        Line("critic, repeats an update", "critic/oom_retries", color=2),
        smooth=False,
    ),
)


def panel_specs(metrics: Mapping[str, Series]) -> list[dict[str, Any]]:
    """The panels that this run has data for, as the page's script reads them; the curves stay in the metrics."""
    panels = [PANELS[0], *_validation_panels(metrics), *PANELS[1:]]
    specs = []
    for panel in panels:
        lines = []
        for place, line in enumerate(panel.lines, start=1):
            key = next((key for key in (line.key, line.other) if key in metrics and metrics[key].finite()), None)
            if key is None or (line.unless_same and any(metrics[key] == metrics[one["key"]] for one in lines)):
                continue
            lines.append({"label": line.label, "key": key, "style": line.style, "color": line.color or place})
        if lines:
            specs.append(asdict(panel) | {"lines": lines})
    return specs


def _validation_panels(metrics: Mapping[str, Series]) -> list[Panel]:
    """Mean accuracy per data source, and what several samples of a prompt reach together."""
    keys = sorted(key for key in metrics if key.startswith("val-core/"))
    sources = {key: key.removeprefix("val-core/").rsplit("/", 2)[0] for key in keys}
    means: list[Line] = []
    others: list[Line] = []
    for key, source in sources.items():
        statistic = key.rpartition("/")[2]
        label = f"{source.rpartition('/')[2]} {statistic}" if len(set(sources.values())) > 1 else statistic
        (means if statistic.startswith("mean@") else others).append(Line(label, key))
    several = "Held-out prompts with several samples each."
    return [
        _panel("learning/validation", "Validation", "Mean score on held-out prompts.", *means, markers=True),
        _panel("learning/validation-n", "Validation, several tries", several, *others, markers=True),
    ]
