"""The pictures of a report: which metrics each one draws, and what a reader should look for in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from valor.report.run_data import Series


@dataclass(frozen=True)
class Line:
    """One curve: its label, the metrics it may come from in order of preference, and how it is drawn."""

    label: str
    keys: tuple[str, ...]
    style: str = "solid"  # solid | dash | faint
    color: int = 0  # place in the page's palette, from 1; 0: by position
    unless_same: bool = False  # leave it out where it equals a curve above it


@dataclass(frozen=True)
class Panel:
    """One picture. `unit`: "" or "%" or "s"; `bounds`: the widest range the axis may take; `markers`: few points."""

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

_DEVICE, _HOST = "perf/max_memory_allocated_gb", "perf/peak_rss_gb"

PANELS = (
    Panel(
        "reward",
        "learning",
        "Reward",
        "Mean score of a step's responses; after shaping (KL, masks) where that differs.",
        (
            Line("score", ("critic/score/mean",)),
            Line("after shaping", ("critic/rewards/mean",), "dash", unless_same=True),
        ),
    ),
    Panel(
        "missing",
        "learning",
        "Trajectories without reward",
        "Share whose reward was taken away.",
        (Line("missing", ("reward/missing_ratio",)),),
        unit="%",
    ),
    Panel(
        "explained-variance",
        "critic",
        "Explained variance",
        "1 is a perfect critic, 0 one that only knows the mean, and below 0 it misleads. The axis stops at -1.",
        (
            Line("explained variance", ("critic/vf_explained_var",)),
            Line("prompts held out", ("critic/holdout/vf_explained_var",), color=2),
        ),
        bounds=(-1.0, 1.05),
        levels=(0.0, 1.0),
    ),
    Panel(
        "holdout-auc",
        "critic",
        "Right told from wrong",
        "On the prompts held out: how often the value at the end of a right answer is above that of a wrong one.",
        (Line("AUC", ("critic/holdout/auc",)),),
        bounds=(0.0, 1.02),
        levels=(0.5, 1.0),
        markers=True,
    ),
    Panel(
        "value-loss",
        "critic",
        "Value loss",
        "What the critic's optimizer sees.",
        (Line("value loss", ("critic/vf_loss",)),),
    ),
    Panel(
        "values-returns",
        "critic",
        "Values and returns",
        "A calibrated critic's mean value lies on the mean return.",
        (
            Line("values", ("critic/values/mean",)),
            Line("returns", ("critic/returns/mean",), "dash"),
        ),
    ),
    Panel(
        "value-error",
        "critic",
        "Value error along the response",
        "Mean |value - return| in each fifth. A critic that learns from the end sees the last fifth right first.",
        (
            Line("first fifth", ("critic/vf_abs_error/fifth_1",)),
            Line("middle", ("critic/vf_abs_error/fifth_3",)),
            Line("last fifth", ("critic/vf_abs_error/fifth_5",)),
        ),
    ),
    Panel(
        "ensemble",
        "critic",
        "Disagreement of the critics",
        "Standard deviation over the ensemble.",
        (Line("standard deviation", ("critic/ensemble_std",)),),
    ),
    Panel(
        "critic-grad-norm",
        "critic",
        "Critic gradient norm",
        "Before clipping.",
        (Line("gradient norm", ("critic/grad_norm",)),),
    ),
    Panel(
        "kl",
        "policy",
        "KL to the reference",
        "How far the policy has moved from where it began, per token.",
        (
            Line("in the loss", ("actor/kl_loss",)),
            Line("in the reward", ("actor/reward_kl_penalty",), "dash"),
        ),
    ),
    Panel(
        "policy-loss",
        "policy",
        "Policy loss",
        "Clipped surrogate: its level says little, its spikes a lot.",
        (Line("policy loss", ("actor/pg_loss",)),),
        levels=(0.0,),
    ),
    Panel(
        "entropy",
        "policy",
        "Entropy",
        "Nats per token. A fast fall to zero means that exploration has ended.",
        (Line("entropy", ("actor/entropy", "actor/entropy_loss")),),
    ),
    Panel(
        "actor-grad-norm",
        "policy",
        "Actor gradient norm",
        "Before clipping. A gap is a step that was skipped for a non-finite gradient.",
        (Line("gradient norm", ("actor/grad_norm",)),),
    ),
    Panel(
        "clipping",
        "policy",
        "Clipped tokens",
        "Share of tokens whose ratio or value met its clip range.",
        (
            Line("policy", ("actor/pg_clipfrac",)),
            Line("policy, dual clip", ("actor/pg_clipfrac_lower",), "dash"),
            Line("value", ("critic/vf_clipfrac",), color=2),
        ),
        unit="%",
    ),
    Panel(
        "learning-rate",
        "policy",
        "Learning rate",
        "After warm-up and schedule.",
        (Line("actor", ("actor/lr",)), Line("critic", ("critic/lr",), color=2)),
        log=True,
        smooth=False,
    ),
    Panel(
        "response-length",
        "rollout",
        "Response length",
        "Tokens per response.",
        (
            Line("mean", ("response_length/mean",)),
            Line("longest", ("response_length/max",), "faint"),
            Line("shortest", ("response_length/min",), "faint", color=3),
        ),
    ),
    Panel(
        "truncation",
        "rollout",
        "Cut at the limit",
        "Share of responses that ran into the length limit.",
        (Line("cut", ("response_length/clip_ratio",)),),
        unit="%",
    ),
    Panel(
        "rollout-gap",
        "rollout",
        "Rollout against training",
        "How far generation and training disagree about the tokens drawn. It should be rounding noise.",
        (
            Line("log-prob, mean", ("training/rollout_log_probs_diff_mean",)),
            Line("log-prob, largest", ("training/rollout_log_probs_diff_max",), "faint", color=1),
            Line("probability, mean", ("training/rollout_probs_diff_mean",), color=2),
        ),
        log=True,
    ),
    Panel(
        "step-seconds",
        "time",
        "Seconds per step",
        "Wall clock of the training step, without validation and saving.",
        (Line("seconds", ("timing_s/step", "perf/time_per_step")),),
    ),
    Panel(
        "throughput",
        "time",
        "Throughput",
        "Tokens per second and device, prompts included.",
        (Line("tokens/s", ("perf/throughput",)),),
    ),
    Panel(
        "memory",
        "time",
        "Memory",
        "Peak of the fullest process in each phase, GiB: device memory on CUDA, resident memory on a CPU.",
        (
            Line(
                "actor update",
                (f"{_DEVICE}/actor.update", f"{_HOST}/actor.update", "actor/perf/max_memory_allocated_gb"),
            ),
            Line("critic update", (f"{_DEVICE}/critic.update", f"{_HOST}/critic.update")),
            Line("generation", (f"{_DEVICE}/rollout.generate", f"{_HOST}/rollout.generate"), "dash"),
            Line("old log-probs", (f"{_DEVICE}/actor.compute_log_probs", f"{_HOST}/actor.compute_log_probs"), "faint"),
        ),
    ),
    Panel(
        "out-of-memory",
        "time",
        "Out of memory",
        "Micro-batches that did not fit and were repeated in smaller ones: the gradient is the same, time is lost.",
        (
            Line("actor, repeats an update", ("actor/oom_retries", "train/oom_retries")),
            Line("critic, repeats an update", ("critic/oom_retries",), color=2),
        ),
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
            key = next((key for key in line.keys if key in metrics and metrics[key].finite()), None)
            if key is None or (line.unless_same and any(metrics[key] == metrics[one["key"]] for one in lines)):
                continue
            lines.append({"label": line.label, "key": key, "style": line.style, "color": line.color or place})
        if lines:
            specs.append(asdict(panel) | {"lines": lines})
    return specs


def _validation_panels(metrics: Mapping[str, Series]) -> list[Panel]:
    """Mean accuracy per data source, and what several samples of a prompt reach together."""
    keys = sorted(key for key in metrics if key.startswith("val-core/"))
    means = [key for key in keys if key.rpartition("/")[2].startswith("mean@")]
    others = [key for key in keys if key not in means]
    several_sources = len({_source(key) for key in keys}) > 1
    return [
        Panel(id_, "learning", title, note, tuple(_val_line(key, several_sources) for key in chosen), markers=True)
        for id_, title, note, chosen in (
            ("validation", "Validation", "Mean score on held-out prompts.", means),
            ("validation-n", "Validation, several tries", "Held-out prompts with several samples each.", others),
        )
    ]


def _source(key: str) -> str:
    return key.removeprefix("val-core/").rsplit("/", 2)[0]


def _val_line(key: str, with_source: bool) -> Line:
    statistic = key.rpartition("/")[2]
    return Line(f"{_source(key).rpartition('/')[2]} {statistic}" if with_source else statistic, (key,))
