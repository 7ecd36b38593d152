"""The run folder: where its records lie, and how they are taken back to an earlier step when a run resumes there.

config.yaml              the resolved configuration
metrics.jsonl            one line a step: {"step": 3, "critic/score/mean": 0.5, …}; null for a non-finite value
samples/step_3.jsonl     sample generations of training; samples/val_step_3.jsonl of validation
run.json                 facts about the run (name, command, versions, …)
tensorboard/, wandb/     what those loggers write
previous/1/ …            the records of earlier runs, where a run was started afresh in the same folder
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
SAMPLES_DIR = "samples"
TENSORBOARD_DIR = "tensorboard"
INFO_FILE = "run.json"
_SAMPLES_NAME = re.compile(r"(?:val_)?step_(\d+)\.jsonl")


def samples_file(run_dir: Path, step: int, split: str = "train") -> Path:
    """Where the sample generations of `step` lie; split is "train" or "val"."""
    return run_dir / SAMPLES_DIR / f"{'val_' if split == 'val' else ''}step_{step}.jsonl"


def step_of_samples(path: Path) -> int | None:
    """The step that a samples file is about; None if its name is not one of ours."""
    match = _SAMPLES_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def rewind(run_dir: Path, step: int | None) -> None:
    """Make the records say nothing about steps after `step`; None: a new run, older records move to `previous/`.

    A line that a killed process left unfinished goes too.
    """
    if step is None:
        _set_aside(run_dir)
        return
    metrics = run_dir / METRICS_FILE
    if metrics.exists():
        with metrics.open(encoding="utf-8") as lines:
            kept = [line for line in lines if _step_of_line(line) <= step]
        write_atomically(metrics, "".join(kept))
    for path in (run_dir / SAMPLES_DIR).glob("*.jsonl"):
        if (sampled_at := step_of_samples(path)) is not None and sampled_at > step:
            path.unlink()


def write_run_info(run_dir: Path, **facts: Any) -> None:
    """Merge `facts` (JSON values) into run.json."""
    write_atomically(run_dir / INFO_FILE, json.dumps({**read_run_info(run_dir), **facts}, indent=2) + "\n")


def read_run_info(run_dir: Path) -> dict[str, Any]:
    """The facts in run.json; `{}` if there is no such file."""
    path = run_dir / INFO_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_atomically(path: Path, text: str) -> None:
    """Write beside and rename: whoever opens `path` finds the old text or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _set_aside(run_dir: Path) -> None:
    found = [run_dir / name for name in (METRICS_FILE, SAMPLES_DIR, TENSORBOARD_DIR) if (run_dir / name).exists()]
    if not found:
        return
    earlier = run_dir / "previous"
    place = earlier / str(1 + sum(1 for _ in earlier.glob("*")))
    place.mkdir(parents=True)
    for path in found:
        path.rename(place / path.name)


def _step_of_line(line: str) -> float:
    """The step of a metrics line; infinity for an unfinished one, which no resume point keeps."""
    if not line.endswith("\n"):
        return float("inf")
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
