"""Reads a run folder: metrics by name, configuration, facts about the run, and a selection of sample generations."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from valor.config.tree import flatten
from valor.errors import UserError
from valor.tracking.diagnosis import Diagnosis, Finding
from valor.tracking.metrics import Histogram
from valor.tracking.rundir import METRICS_FILE, SAMPLES_DIR, read_run_info, read_yaml, step_of_samples

MAX_POINTS = 1200  # per curve: more than a screen is wide
MAX_SAMPLE_STEPS = 8  # per split, the first and the last among them
MAX_SAMPLES_PER_STEP = 8
MAX_TOKENS_PER_SAMPLE = 1500
MAX_PROMPT_CHARACTERS = 6000
T = TypeVar("T")


@dataclass(frozen=True)
class Series:
    """One metric over the steps at which it was measured; None where it was not finite."""

    steps: list[int]
    values: list[float | None]

    def finite(self) -> list[float]:
        return [value for value in self.values if value is not None]


StepHistogram = tuple[int, Histogram]


@dataclass(frozen=True)
class RunData:
    """The content of a report."""

    folder: Path
    metrics: dict[str, Series]
    config: dict[str, Any]
    info: dict[str, Any]
    samples: list[dict[str, Any]]
    histograms: dict[str, list[StepHistogram]]
    findings: list[Finding]

    def first_of(self, *keys: str) -> Series | None:
        """The first of these metrics that the run has."""
        return next((self.metrics[key] for key in keys if key in self.metrics), None)


def read_run(run_dir: Path) -> RunData:
    """Everything in the run folder; UserError if it holds no metrics, or a file there is damaged."""
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise UserError(f"{run_dir} holds no {METRICS_FILE}: a run writes it if trainer.logger contains 'file'")
    steps = read_steps(path)
    metrics, histograms = as_series(steps)
    info = read_run_info(run_dir)
    if not metrics and not info.get("stopped"):
        raise UserError(f"{path} holds no metrics: there is nothing to report before the first step has finished")
    config_file = run_dir / "config.yaml"
    config = read_yaml(config_file) if config_file.is_file() else {}
    diagnosis = Diagnosis(flatten(config or {}))
    for step, record in steps.items():
        diagnosis.add(step, record)
    findings = [*diagnosis.findings.values()]
    if reason := info.get("stopped"):
        last = max(steps, default=0)
        remedy = "start it again to go on" if last else "mend that, and start it again"
        findings.insert(0, Finding("stopped", f"the run ended early: {reason}", remedy, last, last))
    return RunData(run_dir, metrics, config or {}, info, read_samples(run_dir), histograms, findings)


def read_steps(path: Path) -> dict[int, dict[str, Any]]:
    """The metrics of each step in metrics.jsonl, in order; of lines about the same step the later one wins."""
    merged: dict[int, dict[str, Any]] = {}
    for record in _read_lines(path):
        merged.setdefault(record["step"], {}).update(record)
    return dict(sorted(merged.items()))


def as_series(steps: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, Series], dict[str, list[StepHistogram]]]:
    """The metrics of each step as a series for each metric, and the histograms."""
    metrics: dict[str, Series] = {}
    histograms: dict[str, list[StepHistogram]] = {}
    for step, record in steps.items():
        for key, value in record.items():
            if isinstance(value, dict) and value.keys() == {"low", "high", "counts"}:
                histograms.setdefault(key, []).append((step, Histogram(**value)))
            elif key != "step" and (value is None or isinstance(value, int | float)):
                series = metrics.setdefault(key, Series([], []))
                series.steps.append(step)
                series.values.append(value)
    return metrics, histograms


def read_samples(run_dir: Path) -> list[dict[str, Any]]:
    """Up to MAX_SAMPLE_STEPS steps of each split, training first: `step`, `split`, the first samples as `records`, and
    the number of those recorded (`available`)."""
    files = [(step_of_samples(path), path) for path in (run_dir / SAMPLES_DIR).glob("*.jsonl")]
    groups = []
    for split in ("train", "val"):
        steps = [(i, path) for i, path in files if i is not None and path.name.startswith("val_") == (split == "val")]
        for step, path in evenly_spaced(sorted(steps), MAX_SAMPLE_STEPS):
            records = _read_lines(path)
            try:
                shown = [_shorten(record) for record in records[:MAX_SAMPLES_PER_STEP]]
            except (KeyError, TypeError):
                raise UserError(f"{path} holds no samples of a run: move it away and try again") from None
            groups.append({"step": step, "split": split, "records": shown, "available": len(records)})
    return groups


def evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items at even distances, the first and the last among them; all if there are no more."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def thin(series: Series, limit: int = MAX_POINTS) -> Series:
    """At most `limit` points that draw the same curve: of each stretch the lowest and the highest, so spikes stay."""
    if len(series.steps) <= limit:
        return series
    chosen: set[int] = set()
    for stretch in np.array_split(np.arange(len(series.steps)), limit // 2):
        measured = [i for i in stretch.tolist() if series.values[i] is not None] or [int(stretch[0])]
        chosen |= {min(measured, key=series.values.__getitem__), max(measured, key=series.values.__getitem__)}
    return Series([series.steps[i] for i in sorted(chosen)], [series.values[i] for i in sorted(chosen)])


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file; an unfinished last line is left out, any other damage is a UserError."""
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=lambda _: None)  # NaN and infinities, of other programs
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # no newline behind it: the writer was stopped in the middle
                break
            raise UserError(f"{path}: line {number} is not JSON: remove that line and try again") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(f"{path}: line {number} has no step: remove that line and try again")
        records.append(record)
    return records


def _shorten(record: dict[str, Any]) -> dict[str, Any]:
    """The record with the end of a long prompt and the first tokens of a long response (`tokens_left_out`)."""
    count, limit = len(record["tokens"]), MAX_TOKENS_PER_SAMPLE
    by_token = {key: value[:limit] for key, value in record.items() if isinstance(value, list) and len(value) == count}
    prompt = record["prompt"]
    shown = prompt if len(prompt) <= MAX_PROMPT_CHARACTERS else f"[…] {prompt[-MAX_PROMPT_CHARACTERS:]}"
    return {**record, **by_token, "prompt": shown, "tokens_left_out": max(0, count - limit)}


def rounded(value: float | None) -> float | None:
    """Six significant digits, which is more than a screen shows; None for what is not finite."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
