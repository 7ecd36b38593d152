"""What the studies on walks share: warm starts, runs of a sweep, and what came of them without sampling error."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from valor.cli import main as valor
from valor.engines.checkpoint import MODEL_CONFIG_DIR
from valor.lab import demo, walk
from valor.lab.statistics import bootstrap_interval, detectable_effect
from valor.lab.sweep_plan import SweepConfig, plan_sweep, texts
from valor.lab.walk import DataFiles
from valor.rewards.walk import Walk
from valor.trainer.export import export_checkpoint
from valor.trainer.main_sft import main as sft
from walk_values import exact_values

CONFIGS = Path(demo.__file__).with_name("demo_config")
SAMPLES, GROUP = 256, 8  # a step, and of a prompt: for every arm


def warm_start(out: Path, length: int, seed: int = 0, *, demo_size: bool = False) -> tuple[DataFiles, Path]:
    """Data of walks of this length, and a policy that knows where doors lead and takes them at random: smaller than
    the demo's model or, with `demo_size`, that model."""
    folder = out / f"length_{length}"
    files = walk.make_data(folder / "data", seed, length=length)
    trained = folder / "sft" / "huggingface" / "actor"
    if not trained.is_dir():
        model = walk.make_model(folder / "model", seed)
        if not demo_size:
            smaller(model, seed)
        settings = demo.sft_overrides(model, files, folder / "sft", seed)
        in_fork(_sft, [*settings, f"data.max_length={2 * length + 8}"])
    return files, trained


def _sft(settings: list[str]) -> None:
    raise SystemExit(sft(settings))


def smaller(model: Path, seed: int) -> None:
    """The demo's model with two layers of 64 in place of three of 128, which learns these walks as well: studies are
    hundreds of runs."""
    config = AutoConfig.from_pretrained(model, hidden_size=64, intermediate_size=192, num_hidden_layers=2)
    config.layer_types = config.layer_types[:2]
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)


def base(files: DataFiles, policy: Path, length: int, steps: int, noise: float) -> dict[str, Any]:
    """Settings of every run: the same samples a step and an update, and the same learning rates."""
    return {
        "data.train_files": str(files.train),
        "data.val_files": None,
        "data.max_response_length": 2 * length,
        "data.train_batch_size": SAMPLES // GROUP,
        "actor_rollout_ref.model.path": str(policy),
        "actor_rollout_ref.rollout.n": GROUP,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "critic.optim.lr": 2e-3,
        "algorithm.reward_noise": noise,
        "critic.ppo_mini_batch_size": 4,
        "trainer.critic_warmup": 10,
        "trainer.total_training_steps": steps,
        "trainer.report": False,
        "trainer.log_generations": 0,
        "trainer.test_freq": -1,
    }


def better(out: Path, settings: Mapping[str, Any], where: Walk) -> Path:
    """The policy after GRPO: another one than the warm start, for a critic of its own."""
    return trained(out, {**settings, "algorithm.adv_estimator": "grpo", "trainer.critic_warmup": 0}, where) / "actor"


def pretrained(out: Path, settings: Mapping[str, Any], where: Walk, policy: Path) -> Path:
    """A critic fitted to this policy's outcomes, noise left out; 80 steps of samples, the policy standing still.

    Not by `valor critic pretrain`, which keeps prompts for itself to choose an epoch: here are eight prompts in all.
    """
    own = {"actor_rollout_ref.model.path": str(policy), "algorithm.reward_noise": 0.0, "trainer.critic_warmup": 80}
    return trained(out, {**settings, **own, "trainer.total_training_steps": 80}, where) / "critic"


def trained(run: Path, settings: Mapping[str, Any], where: Walk) -> Path:
    """The models that a run leaves."""
    if not scores(run):
        words = [*texts(settings), f"trainer.default_local_dir={run}"]
        in_fork(_run, ["ppo", "--config-path", str(CONFIGS), "--config-name", "walk_ppo", *words], run, where, True)
    return run / "huggingface"


def in_fork(function: Callable[..., Any], *arguments: Any) -> None:
    """A run leaves threads and processes behind, which the next one could not use: each has a fork of its own."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit("a run failed")


def run_arms(
    out: Path,
    settings: Mapping[str, Any],
    arms: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    parallel: int,
    where: Walk,
) -> dict[str, Path]:
    """All arms with all seeds, each in a fork of this process, so that nothing is imported twice; runs that have a
    score already are not repeated. A run leaves metrics.jsonl and score.json: of every checkpoint (without `save_freq`
    the last step alone) the policy's exact score, and its critics against the truth. Models are deleted. Returns the
    folders of the arms."""
    folders = {name: re.sub(r"[^\w.]+", "-", name.replace("λ", "lam")) for name in arms}
    config = SweepConfig(
        name=out.name,
        config_path=str(CONFIGS),
        config_name="walk_ppo",
        base=dict(settings),
        arms={folders[name]: dict(own) for name, own in arms.items()},
        seeds=list(seeds),
        metric="critic/score/mean",
        out=str(out),
    )
    todo = [run for run in plan_sweep(config).runs if not scores(run.folder)]
    fork, running = multiprocessing.get_context("fork"), dict[int, Any]()
    for number, run in enumerate(todo, 1):
        print(f"{time.strftime('%H:%M:%S')} {number}/{len(todo)} {run.folder}", flush=True)
        process = fork.Process(target=_run, args=(list(run.command[3:]), run.folder, where))
        process.start()
        running[process.sentinel] = process
        while len(running) >= (parallel if number < len(todo) else 1):
            for sentinel in multiprocessing.connection.wait(list(running)):
                ended = running.pop(sentinel)
                ended.join()
                if ended.exitcode:
                    raise SystemExit(f"a run in {out} failed: its console.log says why")
    return {name: out / folder for name, folder in folders.items()}


def _run(words: list[str], folder: Path, where: Walk, keep: bool = False) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with open(folder / "console.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if code := valor(words):
        raise SystemExit(code)
    checkpoints = sorted(folder.glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    found = {int(path.name.rpartition("_")[2]): _judged(where, path) for path in checkpoints}
    (folder / "score.json").write_text(json.dumps(found))
    for path in (*checkpoints, *([] if keep else [folder / "huggingface"])):
        shutil.rmtree(path)


def _judged(where: Walk, checkpoint: Path) -> dict[str, float]:
    models = (path.parent.name for path in checkpoint.glob(f"*/{MODEL_CONFIG_DIR}"))  # a regression is none
    roles = sorted(role for role in models if role.startswith(("actor", "critic")))
    with tempfile.TemporaryDirectory() as folder:
        for role in roles:
            export_checkpoint(checkpoint, Path(folder) / role, role)
        states = exact_values(where, Path(folder) / "actor")
        critics = [Path(folder) / role for role in roles if role != "actor"]
        reduce = (lambda v: v.amin(0)) if "min" in checkpoint.parents[1].name.split("-") else (lambda v: v.mean(0))
        return {"score": states.score, **(states.judge(critics, reduce) if critics else {})}


def scores(run: Path) -> dict[int, dict[str, float]]:
    """By step: what was measured of a run's checkpoints; {} before it has ended."""
    file = run / "score.json"
    return {int(step): found for step, found in json.loads(file.read_text()).items()} if file.is_file() else {}


def tokens(run: Path) -> int:
    """Response tokens that the run has generated, those of branches included."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return round(
        sum(
            s["response_length/mean"] * SAMPLES + s.get("branches/tokens", 0)
            for s in steps
            if "response_length/mean" in s
        )
    )


def seconds(run: Path) -> float:
    """Time of the run's steps."""
    return sum(json.loads(line).get("timing_s/step", 0.0) for line in (run / "metrics.jsonl").read_text().splitlines())


def shown(values: Sequence[float]) -> str:
    """Mean over seeds with its 95 % bootstrap interval."""
    mean, interval = sum(values) / len(values), bootstrap_interval(values)
    return f"{mean:.3f}" if interval is None else f"{mean:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"


def compared(values: Sequence[float], control: Sequence[float]) -> tuple[str, str]:
    """Mean difference by seed with its interval, and the effect that so many seeds find with power 0.8."""
    gaps = [a - b for a, b in zip(values, control, strict=True)]
    effect = detectable_effect(gaps)
    return shown(gaps), "" if effect is None else f"{effect:.3f}"
