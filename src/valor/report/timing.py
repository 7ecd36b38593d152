"""Where the time of a step goes: seconds of each phase, as the report's stacked bars need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from valor.report.run_data import Series, rounded

# The order of a step's work, which is the order of the layers in the timing picture.
PHASES = {
    "gen": "generate",
    "reward": "reward",
    "old_log_prob": "old log-probs",
    "ref": "reference log-probs",
    "values": "values",
    "adv": "advantages",
    "update_critic": "train critic",
    "update_actor": "train actor",
    "update_weights": "sync weights",
    "testing": "validate",
    "save_checkpoint": "save",
}
AFTER_THE_STEP = ("timing_s/testing", "timing_s/save_checkpoint")
MAX_BARS = 120
_BEGAN = "timing_began_s/"


def timing_spec(metrics: Mapping[str, Series]) -> dict[str, Any] | None:
    """Seconds of each phase per step, in bars of equally many steps; None if the run did not time itself.

    What a step took beyond its phases is the phase "other"; validation and saving come after the step.
    """
    phases = [key for key in metrics if key.startswith("timing_s/") and key != "timing_s/step"]
    if not phases:
        return None
    order = list(PHASES)
    phases.sort(key=lambda key: (order.index(key[9:]) if key[9:] in order else len(order), key))
    seconds = {key: dict(zip(metrics[key].steps, metrics[key].values, strict=True)) for key in phases}
    whole = metrics.get("timing_s/step")
    steps = sorted({step for key in phases for step in metrics[key].steps})
    if whole is not None:
        totals = dict(zip(whole.steps, whole.values, strict=True))
        steps = [step for step in steps if totals.get(step)]
        within = [key for key in phases if key not in AFTER_THE_STEP]
        seconds["timing_s/other"] = {
            step: max((totals[step] or 0.0) - sum(seconds[key].get(step) or 0.0 for key in within), 0.0)
            for step in steps
        }
    if not steps:
        return None
    per_bar = -(-len(steps) // MAX_BARS)
    bars = [steps[i : i + per_bar] for i in range(0, len(steps), per_bar)]
    return {
        "bars": [f"{bar[0]}" if len(bar) == 1 else f"{bar[0]}-{bar[-1]}" for bar in bars],
        "phases": [
            {
                "label": PHASES.get(key[9:], key[9:].replace("_", " ")),
                "seconds": [rounded(sum(one.get(step) or 0.0 for step in bar)) for bar in bars],
            }
            for key, one in seconds.items()
            if sum(one.get(step) or 0.0 for step in steps) > 0
        ],
    }


def timeline_spec(metrics: Mapping[str, Series]) -> dict[str, Any] | None:
    """The last timed step on the clock: `began` and `seconds` of each phase; None where the run did not say.

    Phases of roles that live in different pools overlap.
    """
    began = {key[len(_BEGAN) :]: series for key, series in metrics.items() if key.startswith(_BEGAN)}
    steps = [series.steps[-1] for name, series in began.items() if f"timing_s/{name}" not in AFTER_THE_STEP]
    if not steps:
        return None
    step = max(steps)
    rows = []
    for name, series in began.items():
        seconds = metrics.get(f"timing_s/{name}")
        if seconds and series.steps[-1] == seconds.steps[-1] == step and f"timing_s/{name}" not in AFTER_THE_STEP:
            label = PHASES.get(name, name.replace("_", " "))
            rows.append({"label": label, "began": series.values[-1] or 0.0, "seconds": seconds.values[-1] or 0.0})
    return {"step": step, "rows": sorted(rows, key=lambda row: row["began"])}
