"""`valor doctor`: what this machine has, whether a run works on it, and a line to paste into an issue."""

import io
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import psutil
import torch

from valor import __version__
from valor.arguments import command, option
from valor.errors import TrainingStopped, UserError
from valor.hub import hub_answers
from valor.lab import arithmetic
from valor.lab.api import PPO
from valor.machine import available_cores, memory
from valor.models.linear import bfloat16_is_slow
from valor.sandbox.box import SandboxError
from valor.sandbox.levels import strongest_level
from valor.trainer.memory_plan import GIB

_PACKAGES = ("torch", "transformers", "ray", "vllm", "peft", "datasets")
_AGREE = 1e-5  # between log-probs of the native engine and of training, in float32 on a CPU


@command("doctor", "valor doctor", "installation")
@option("--no-test", is_flag=True, help="Leave the self-test out.")
def main(no_test: bool) -> int:
    """What this machine has, and whether a run works on it. The exit code is 1 where the self-test fails."""
    facts = dict[str, str]()
    for title, text in _machine():
        facts[title] = text
        print(f"{title:<12} {text}", flush=True)
    works = True
    if not no_test:
        works, facts["self-test"] = self_test()
        print(f"{'self-test':<12} {facts['self-test']}")
    print("\nfor an issue: " + " | ".join(text for title, text in facts.items() if title not in ("disk", "hub")))
    return 0 if works else 1


def _machine() -> Iterator[tuple[str, str]]:
    installed = {package.name.replace("_", "-"): package.version for package in distributions()}
    builds = {name: next((build for build in (name, f"{name}-cpu") if build in installed), None) for name in _PACKAGES}
    packages = ", ".join(f"{build} {installed[build]}" if build else f"no {name}" for name, build in builds.items())
    yield "versions", f"valor {__version__}, python {platform.python_version()}, {packages}"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    each = ", ".join(f"{gpu.name} {gpu.total_memory / GIB:.0f} GiB" for gpu in gpus)
    cores = f"{available_cores()} of {os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"
    busy = psutil.cpu_percent(0.5) / 100 * (os.cpu_count() or 1)
    slow = "; products of bfloat16 are computed in float32" if not gpus and bfloat16_is_slow() else ""
    yield "devices", f"{each or 'no GPU'}; {cores}, {busy:.1f} cores busy with other work{slow}"
    total, available = memory()
    yield "memory", f"{available / GIB:.1f} of {total / GIB:.1f} GiB free"
    try:
        yield "sandbox", strongest_level()
    except SandboxError as error:
        yield "sandbox", f"none: {error}"
    yield "disk", f"{shutil.disk_usage('.').free / GIB:.1f} GiB free in {Path.cwd()}"
    yield "hub", "answers" if hub_answers() else "out of reach, or HF_HUB_OFFLINE=1: only its cache is read"


def self_test() -> tuple[bool, str]:
    """Two steps of PPO on a tiny model, and the second again from its checkpoint: whether all is well, and in words."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with redirect_stdout(io.StringIO()):
                model = arithmetic.make_model(Path(folder) / "model")
                straight = _run(model, Path(folder) / "straight")
                first = straight.folder / "global_step_1"
                resumed = _run(model, Path(folder) / "resumed", resume_mode="resume_path", resume_from_path=first)
                pairs = zip(straight.policy.parameters(), resumed.policy.parameters(), strict=True)
                same = all(torch.equal(a, b) for a, b in pairs)
        except (UserError, TrainingStopped, RuntimeError, OSError) as error:
            return False, f"failed: {type(error).__name__}: {error}"
    gap = max(step["training/rollout_log_probs_diff_max"] for step in (*straight.metrics, *resumed.metrics))
    well, step = same and gap <= _AGREE, straight.metrics[-1]["timing_s/step"]
    agree = f"log-probs of generation and training differ by at most {gap:.1e}"
    trip = f"a resumed run {'is bit for bit' if same else 'DIFFERS from'} one without a break"
    return well, f"{'ok' if well else 'FAILED'} in {time.monotonic() - began:.1f} s: step {step:.2f} s, {agree}, {trip}"


def _run(model: Path, folder: Path, **more: Any) -> PPO:
    return PPO(
        model,
        [{"prompt": f"{a}+{a + 1}="} for a in range(10, 18)],
        reward=lambda completions: [float(sum(map(str.isdigit, text))) for text in completions],
        train_batch_size=8,
        max_prompt_length=32,
        max_response_length=8,
        actor={"ppo_mini_batch_size": 4, "optim": {"lr": 1e-4}, "fsdp_config": {"dtype": "float32"}},
        critic={"ppo_mini_batch_size": 4},
        trainer={"device": "cpu", "num_threads": 1, "report": False, "logger": ["file"], "default_local_dir": folder},
        reward__num_workers=1,
        total_training_steps=2,
        save_freq=1,
        **more,
    ).train()
