#!/usr/bin/env python3
"""The first hour on GPUs: runs what the machine allows, one command after another, and writes one report.

    python benchmarks/gpu_first_hour.py [--model DIR] [--out gpu_first_hour.md] [--work FOLDER]

`--model` is a Hugging Face directory or hub name for the runs (default: the tiny model of `valor demo`, which needs no
download but says little about speed). Nothing stops it: a step that fails, hangs for ten minutes or cannot run here is
a line of the report with its reason. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from valor.lab import arithmetic

LIMIT = 600.0  # seconds of one step
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8"]
VLLM = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.dtype=bfloat16"]
APART = [f"{ROLLOUT}.nnodes=1"]
OFFLOAD = [f"{role}.fsdp_config.{what}_offload=true" for role in (ACTOR, "critic") for what in ("param", "optimizer")]
SAME_BITS = ["trainer.full_determinism=true", "trainer.save_freq=2"]

Rows = list[dict[str, float]]


@dataclass
class Step:
    """A line of the report. `work` returns what was found, or raises with what is wrong."""

    name: str
    work: Callable[[], str]
    gpus: int = 1
    needs: str | None = None  # a package


class Machine:
    """Commands in a folder of their own, and what their runs have logged."""

    def __init__(self, folder: Path, model: str | None) -> None:
        self.folder = folder
        self.env = {**os.environ, "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}
        self.gpus = torch.cuda.device_count()
        self.model = model or str(arithmetic.make_model(folder / "model", seed=0))
        self.files = arithmetic.make_data(folder / "data", seed=0, num_val=64, num_demonstrations=256)

    def call(self, *command: str) -> str:
        """The end of what a command said. RuntimeError with it when the command fails."""
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=self.env)
        said = (done.stdout + done.stderr).strip()
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {said.splitlines()[-1] if said else 'nothing said'}")
        return said

    def ppo(self, name: str, *overrides: str, steps: int = 3, gpus: int = 1, dry: bool = False) -> Rows:
        """The metrics of each step of a run."""
        folder = self.folder / name
        self.said = self.call(
            *(sys.executable, "-m", "valor.trainer.main_ppo", f"data.train_files={self.files.train}"),
            *("data.train_batch_size=32", "data.max_prompt_length=64", "data.max_response_length=64"),
            *(f"{ACTOR}.ppo_mini_batch_size=16", f"{ACTOR}.fsdp_config.dtype=bfloat16"),
            *(f"actor_rollout_ref.model.path={self.model}", "trainer.device=cuda", f"trainer.n_gpus_per_node={gpus}"),
            *("trainer.logger=[file]", "trainer.report=false", f"trainer.total_training_steps={steps}"),
            *(f"trainer.default_local_dir={folder}", *overrides, *(["--dry-run"] if dry else [])),
        )
        return [] if dry else self.rows(folder)

    def sft(self, name: str, *overrides: str) -> Rows:
        folder = self.folder / name
        self.call(
            *(sys.executable, "-m", "valor.trainer.main_sft", f"data.train_files={self.files.sft_train}"),
            *(f"model.path={self.model}", "data.max_length=128", "data.train_batch_size=32", "trainer.device=cuda"),
            *("trainer.n_gpus_per_node=1", "trainer.logger=[file]", "trainer.total_training_steps=2"),
            *(f"trainer.default_local_dir={folder}", *overrides),
        )
        return self.rows(folder)

    @staticmethod
    def rows(folder: Path) -> Rows:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if row["step"]]


def require(holds: bool, found: str) -> str:
    if not holds:
        raise RuntimeError(found)
    return found


def median(rows: Rows, key: str) -> float:
    """Without the first step, which compiles and allocates."""
    return statistics.median(row[key] for row in rows[1:] or rows)


def agreement(rows: Rows, limit: float) -> str:
    gap = max(row["training/rollout_probs_diff_mean"] for row in rows)
    tokens, seconds = median(rows, "response_length/mean") * 256, median(rows, "timing_s/gen")
    memory = max((v for row in rows for k, v in row.items() if "max_memory_allocated" in k), default=float("nan"))
    figures = f"rollout_probs_diff_mean {gap:.4f}, {tokens / seconds:.0f} tokens/s, peak {memory:.1f} GiB"
    return require(gap < limit, figures)


def plan(machine: Machine) -> str:
    machine.ppo("plan", dry=True)
    return next(line.strip() for line in machine.said.splitlines() if "GPU" in line)


def checkpointing(machine: Machine) -> str:
    on = machine.sft("sft")
    off = machine.sft("sft-plain", "model.enable_gradient_checkpointing=false")
    losses = [row["train/loss"] for row in (on[-1], off[-1])]
    return require(abs(losses[0] - losses[1]) < 0.02 * abs(losses[1]), f"losses {losses[0]:.4f} and {losses[1]:.4f}")


def repeated(machine: Machine) -> str:
    once = machine.ppo("once", *GRPO, *SAME_BITS, steps=4)
    machine.ppo("again", *GRPO, *SAME_BITS, steps=2)
    again = machine.ppo("again", *GRPO, *SAME_BITS, steps=4)  # goes on from the checkpoint of step 2
    timeless = [
        [{k: v for k, v in row.items() if not k.startswith(("timing", "perf/", "reward/"))} for row in rows]
        for rows in (once, again)
    ]
    return require(timeless[0] == timeless[1], f"{len(once)} steps, and 2 and 2 more: metrics compared bit by bit")


def offloaded(machine: Machine) -> str:
    plain, moved = machine.ppo("plain"), machine.ppo("moved", *OFFLOAD)
    key, loss = "timing_s/update_actor", "critic/vf_loss"
    times = f"update_actor {median(plain, key):.2f} s, offloaded {median(moved, key):.2f} s"
    return require(abs(plain[-1][loss] - moved[-1][loss]) < 0.05 * abs(plain[-1][loss]) + 1e-4, times)


def wide(machine: Machine) -> str:
    gpus = machine.gpus
    one, all_ = machine.ppo("one"), machine.ppo("all", "trainer.save_freq=1", gpus=gpus)
    fewer = machine.ppo("all", steps=4, gpus=max(gpus // 2, 1))
    gap = abs(one[0]["critic/vf_loss"] - all_[0]["critic/vf_loss"])
    return require(gap < 0.02 and fewer[-1]["step"] == 4, f"vf_loss differs by {gap:.4f}; resumed on {gpus // 2 or 1}")


def apart(machine: Machine, *overrides: str) -> str:
    half = machine.gpus // 2
    rows = machine.ppo("pools", *GRPO, *APART, f"{ROLLOUT}.n_gpus_per_node={half}", *overrides, gpus=half)
    return agreement(rows, 0.02) + f", update_weights {median(rows, 'timing_s/update_weights'):.2f} s"


def profiled(machine: Machine) -> str:
    """Where a step with a critic spends its time; nvidia-smi's word on memory beside it."""
    rows = machine.ppo("critic")
    phases = {k.removeprefix("timing_s/"): median(rows, k) for k in rows[0] if k.startswith("timing_s/")}
    slowest = sorted(phases.items(), key=lambda pair: -pair[1])[:5]
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in slowest)


def steps(machine: Machine) -> list[Step]:
    test = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(Path(__file__).parents[1] / "tests" / "gpu"))
    return [
        Step("topology", lambda: machine.call("nvidia-smi", "topo", "-m").replace("\n", "; ")),
        Step("plan", lambda: plan(machine)),
        Step("make test-gpu", lambda: machine.call(*test).splitlines()[-1]),
        Step("sft, gradient checkpointing", lambda: checkpointing(machine)),
        Step("grpo, native", lambda: agreement(machine.ppo("native", *GRPO), 0.01)),
        Step("repeated and resumed", lambda: repeated(machine)),
        Step("grpo, vllm", lambda: agreement(machine.ppo("vllm", *GRPO, *VLLM), 0.02), needs="vllm"),
        Step("offloading", lambda: offloaded(machine)),
        Step("all GPUs, resumed on half", lambda: wide(machine), gpus=2),
        Step("two pools, native", lambda: apart(machine), gpus=2),
        Step("two pools, vllm", lambda: apart(machine, *VLLM), gpus=2, needs="vllm"),
        Step(
            "vllm, tensor parallel",
            lambda: agreement(machine.ppo("tp", *GRPO, *VLLM, f"{ROLLOUT}.tensor_model_parallel_size=2", gpus=2), 0.02),
            gpus=2,
            needs="vllm",
        ),
        Step("ppo with a critic, phases", lambda: profiled(machine)),
    ]


def run(step: Step, gpus: int) -> tuple[str, str]:
    """Verdict and what was found."""
    if gpus < step.gpus:
        return "skipped", f"needs {step.gpus} CUDA device(s), this machine has {gpus}"
    if step.needs and importlib.util.find_spec(step.needs) is None:
        return "skipped", f"{step.needs} is not installed"
    try:
        return "ok", step.work()
    except subprocess.TimeoutExpired:
        return "FAILED", f"no end after {LIMIT:.0f} s"
    except Exception as error:  # nothing stops the hour
        return "FAILED", f"{type(error).__name__}: {error}".replace("\n", " ")[:500]


def header(machine: Machine) -> list[str]:
    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    names = [torch.cuda.get_device_name(i) for i in range(machine.gpus)] or ["no GPU"]
    packages = ", ".join(f"{name} {installed(name)}" for name in ("torch", "transformers", "ray", "vllm"))
    lines = ["# The first hour on a GPU", "", f"{', '.join(names)}; {platform.platform()}; {os.cpu_count()} cores."]
    return [
        *lines,
        f"Python {platform.python_version()}, CUDA {torch.version.cuda}, {packages}. Model: {machine.model}.",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, default=Path("gpu_first_hour.md"))
    parser.add_argument("--work", type=Path, help="where runs are kept (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        machine = Machine(args.work or Path(temporary), args.model)
        lines = [*header(machine), "", "| step | verdict | found | s |", "|---|---|---|---:|"]
        for step in steps(machine):
            began = time.monotonic()
            verdict, found = run(step, machine.gpus)
            lines.append(f"| {step.name} | {verdict} | {found.replace('|', '/')} | {time.monotonic() - began:.0f} |")
            print(lines[-1], flush=True)
            args.out.write_text("\n".join(lines) + "\n")  # what is known so far
    return 0


if __name__ == "__main__":
    sys.exit(main())
