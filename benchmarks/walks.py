"""What the studies on walks share: warm starts, runs of a sweep, and what came of them without sampling error."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from valor.lab import demo, walk
from valor.lab.statistics import bootstrap_interval, detectable_effect
from valor.lab.sweep import main as sweep
from valor.lab.walk import DataFiles
from valor.lab.walk_values import States, exact_values
from valor.rewards.walk import Walk
from valor.trainer.main_ppo import critic_pretrain
from valor.trainer.main_sft import main as sft

SAMPLES, GROUP = 256, 8  # a step, and of a prompt: for every arm


def warm_start(out: Path, length: int, seed: int = 0) -> tuple[DataFiles, Path]:
    """Data of walks of this length, and a policy that knows where doors lead and takes them at random."""
    folder = out / f"length_{length}"
    files = walk.make_data(folder / "data", seed, length=length)
    trained = folder / "sft" / "huggingface" / "actor"
    if not trained.is_dir():
        walk.make_model(folder / "model", seed)
        settings = demo.sft_overrides(folder / "model", files, folder / "sft", seed)
        if sft([*settings, f"data.max_length={2 * length + 8}"]):
            raise SystemExit("the warm start failed")
    return files, trained


def base(files: DataFiles, policy: Path, length: int, steps: int, noise: float) -> dict[str, Any]:
    """Settings of every run: the same samples a step and an update, and the same learning rates."""
    return {
        "data.train_files": str(files.train),
        "data.val_files": None,
        "data.max_response_length": 2 * length,
        "data.train_batch_size": SAMPLES // GROUP,
        "actor_rollout_ref.model.path": str(policy),
        "actor_rollout_ref.rollout.n": GROUP,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.optim.lr": 2e-4,
        "algorithm.reward_noise": noise,
        "critic.ppo_mini_batch_size": 4,
        "trainer.critic_warmup": 10,
        "trainer.total_training_steps": steps,
        "trainer.report": False,
        "trainer.log_generations": 0,
        "trainer.test_freq": -1,
    }


def pretrained(out: Path, files: DataFiles, policy: Path, length: int) -> Path:
    """A critic fitted to outcomes of the warm start's samples, noise and all left out."""
    run = out / f"length_{length}" / "pretrain"
    exported = run / "huggingface" / "critic"
    if not exported.is_dir():
        settings = [f"data.train_files={files.train}", "data.train_max_samples=1024", "data.train_batch_size=256"]
        settings += ["data.max_prompt_length=8", f"data.max_response_length={2 * length}", "reward.num_workers=1"]
        settings += [f"actor_rollout_ref.model.path={policy}", "actor_rollout_ref.rollout.n=4", "critic.optim.lr=1e-3"]
        settings += ["actor_rollout_ref.actor.fsdp_config.dtype=float32", "critic.ppo_mini_batch_size=16"]
        settings += [
            "critic.model.enable_gradient_checkpointing=false",
            "trainer.device=cpu",
        ]
        settings += ["trainer.num_threads=1", "trainer.total_epochs=8", f"trainer.default_local_dir={run}"]
        if critic_pretrain(settings):
            raise SystemExit("the critic's pre-training failed")
    return exported


def run_arms(
    out: Path, settings: Mapping[str, Any], arms: Mapping[str, Mapping[str, Any]], seeds: int, parallel: int
) -> float:
    """All arms with all seeds by `valor lab sweep`; runs that are there already are not repeated. Seconds it took."""
    began = time.monotonic()
    tree = {
        "name": out.name,
        "config_path": str(Path(demo.__file__).with_name("demo_config")),
        "config_name": "walk_ppo",
        "base": dict(settings),
        "arms": {name: dict(own) for name, own in arms.items()},
        "seeds": list(range(seeds)),
        "metric": "critic/score/mean",
        "parallel": parallel,
        "out": str(out),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.with_name(f"{out.name}.yaml")
    file.write_text(yaml.safe_dump(tree))
    if sweep([str(file)]):
        raise SystemExit(f"runs of {file} failed")
    return time.monotonic() - began


def states(where: Walk, policy: Path) -> States:
    """The values of a saved policy, without the progress lines of its loading."""
    with contextlib.redirect_stderr(io.StringIO()):
        return exact_values(where, policy)


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
