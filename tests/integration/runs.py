"""Looking at what a run left behind."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

# What differs between two runs of the same mathematics.
_CLOCK = ("timing", "perf/", "reward/grading_seconds", "episode/tool_seconds", "trainer/idle_ratio", "rollouter/")


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The run's metrics a step, without those that a clock decides."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(_CLOCK)} for row in rows]


def weights(run_dir: Path, role: str) -> dict[str, torch.Tensor]:
    """The exported model of a role."""
    return load_file(run_dir / "huggingface" / role / "model.safetensors")


def assert_same_run(a: Path, b: Path) -> None:
    """Equal metrics and weights, to the last bit."""
    assert read_metrics(a) == read_metrics(b)
    assert_same_weights(a, b)


def assert_same_weights(a: Path, b: Path) -> None:
    roles = sorted(folder.name for folder in (a / "huggingface").iterdir())
    assert "actor" in roles and roles == sorted(folder.name for folder in (b / "huggingface").iterdir())
    for role in roles:
        first, second = weights(a, role), weights(b, role)
        assert first.keys() == second.keys()
        for name in first:
            assert torch.equal(first[name], second[name]), name
