"""`valor demo`: a tiny model, a warm start by SFT, PPO with a critic (or GRPO), and a look at what came out.

Nothing is downloaded, and nothing here is special: the command lines that are printed are what is run, with the
settings of the files in demo_config/.
"""

import json
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import click
import pyarrow.parquet as pq

from valor.arguments import PATH, command, option
from valor.config import load
from valor.config.command_line import written
from valor.lab import arithmetic, lookup, luck, walk
from valor.report.page import build_report
from valor.tracking.console import format_seconds, say
from valor.tracking.rundir import METRICS_FILE, write_run_info

ROLES = {"ppo": ("actor", "critic"), "grpo": ("actor",)}
TASKS = {"arithmetic": arithmetic, "search": lookup, "walk": walk, "luck": luck}


@dataclass(frozen=True)
class Results:
    """Greedy accuracy on the validation problems; mean reward of the samples drawn for training (T = 1), and how often
    each of them called a tool. NaN: there were none."""

    validation: float
    sampled: float
    calls: float


@command("demo", "valor demo --task search", "quickstart")
@option("--out", type=PATH, default="runs/demo", help="Folder for everything.")
@option(
    "--task", type=click.Choice(list(TASKS)), default="arithmetic", help="Sums, questions to look up, walks, choices."
)
@option("--algorithm", type=click.Choice(list(ROLES)), default="ppo")
@option("--seed", type=int, default=0)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
def main(out: Path, task: str, algorithm: str, seed: int, overrides: tuple[str, ...]) -> int:
    """Train a tiny model from nothing, on this machine: make, warm-start, train, check.

    KEY=VALUE: further settings of the RL runs. The exit code is that of the step that failed, else 0.
    """
    embedded, began = TASKS[task], time.monotonic()
    say(f"[1/4] a tiny model and its {embedded.PROBLEMS} in {out}")
    embedded.make_model(out / "model", seed)
    files = embedded.make_data(out / "data", seed)

    run_dir, start = out / algorithm, out / "sft" / "huggingface" / "actor"
    settings = [*ppo_overrides(start, files, run_dir, algorithm, seed), *overrides]
    load(settings)  # a mistake is told before the warm start

    say(f"[2/4] warm start: supervised training on the answers of a teacher who {embedded.TEACHER}")
    if code := _run("sft", sft_overrides(out / "model", files, out / "sft", seed)):
        return code

    say(f"[3/4] {algorithm.upper()} on the same kind of problems, rewarded for right results alone")
    if code := _run("ppo", settings):
        return code

    if (run_dir / METRICS_FILE).exists():
        write_run_info(run_dir, about=embedded.ANSWERS)
        build_report(run_dir)
    say("[4/4] what came out: models that transformers loads, report and numbers")
    for role in ROLES[algorithm]:
        say(f"  {role:<8} {run_dir / 'huggingface' / role}")
    for name in ("report.html", METRICS_FILE):
        if (run_dir / name).exists():
            say(f"  {name.partition('.')[0]:<8} {run_dir / name}")
    before, after = read_results(run_dir)
    say(f"{_measured(files)}: {before.validation:.3f} -> {after.validation:.3f}")
    say(f"mean reward of the samples drawn in training: {before.sampled:.3f} -> {after.sampled:.3f}")
    if isinstance(files, walk.DataFiles):
        say(files.yardstick)
    if isinstance(files, lookup.DataFiles):
        say(f"searches in each of them: {before.calls:.2f} -> {after.calls:.2f}")
        code = _control(files, run_dir, algorithm, seed, overrides)
    if isinstance(files, luck.DataFiles) and algorithm == "ppo":
        code = _without_critic(files, start, run_dir, seed, overrides)
    say(f"{format_seconds(time.monotonic() - began)} in all")
    return code


def sft_overrides(model: Path, files: arithmetic.DataFiles, run_dir: Path, seed: int) -> list[str]:
    """The warm start as settings of `valor sft`."""
    paths = {"model.path": model, "data.train_files": files.sft_train, "data.val_files": files.sft_val}
    settings = [f"{key}={written(str(path))}" for key, path in paths.items()]
    return [*_config(files, "sft", run_dir, seed), *settings]


def ppo_overrides(
    model: Path, files: arithmetic.DataFiles, run_dir: Path, algorithm: str = "ppo", seed: int = 0
) -> list[str]:
    """The RL run as settings of `valor ppo`: the same samples per step and per update for both algorithms."""
    path = f"actor_rollout_ref.model.path={written(str(model))}"
    return [*_config(files, algorithm, run_dir, seed), path, *files.settings]


def _config(files: arithmetic.DataFiles, name: str, run_dir: Path, seed: int) -> list[str]:
    config = [f"--config-path={Path(__file__).with_name('demo_config')}", f"--config-name={files.config_prefix}{name}"]
    return [*config, f"trainer.seed={seed}", f"trainer.default_local_dir={written(str(run_dir))}"]


def read_results(run_dir: Path) -> tuple[Results, Results]:
    """Before training (the first step still samples from the old policy) and after the last step, from the metrics."""
    lines = [json.loads(line) for line in (run_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
    series = [
        [v for m in lines for k, v in m.items() if k.startswith("val-core/") and k.endswith("/mean@1")],
        *([m[key] for m in lines if key in m] for key in ("critic/score/mean", "episode/tool_calls")),
    ]
    before, after = (Results(*(values[i] if values else math.nan for values in series)) for i in (0, -1))
    return before, after


def _measured(files: arithmetic.DataFiles) -> str:
    return files.measured.format(pq.read_metadata(files.val).num_rows)


def _control(files: lookup.DataFiles, run_dir: Path, algorithm: str, seed: int, overrides: Sequence[str]) -> int:
    """Validate the trained policy on a corpus without the names of the validation questions."""
    say("control: the trained policy, and no document about any of these names")
    blind = run_dir.with_name(f"{run_dir.name}_control")
    model, files = run_dir / "huggingface" / "actor", replace(files, corpus=files.corpus_without)
    code = _run("ppo", [*ppo_overrides(model, files, blind, algorithm, seed), *overrides, "trainer.val_only=true"])
    if not code:
        say(f"accuracy on the same problems when searches find nothing: {read_results(blind)[0].validation:.3f}")
    return code


def _without_critic(files: luck.DataFiles, start: Path, run_dir: Path, seed: int, overrides: Sequence[str]) -> int:
    """Train by GRPO from the same start, with as many episodes, and say what made the difference."""
    say("for comparison: GRPO from the same start, with as many updates from as many episodes")
    other = run_dir.with_name("grpo")
    shared = [setting for setting in overrides if not setting.startswith(("critic.", "algorithm."))]
    if code := _run("ppo", [*ppo_overrides(start, files, other, "grpo", seed), *shared]):
        return code
    (_, ppo), (_, grpo) = read_results(run_dir), read_results(other)
    last = json.loads((run_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()[-1])
    explained = [f"{value:.2f}" for key, value in last.items() if key.startswith("critic/vf_explained_var/turn_")]
    left, spread = (last[f"critic/baseline_variance/{name}"] for name in ("critic", "group_mean"))
    say(f"{_measured(files)}: PPO {ppo.validation:.3f}, GRPO {grpo.validation:.3f}")
    say("why: it reads the luck after the first turn; of how outcomes vary the critic explains, turn by turn,")
    say(f"{', '.join(explained)}")
    say(f"return minus value has a variance of {left:.1f}, return minus the mean of other episodes {spread:.1f}")
    return 0


def _run(command: str, overrides: Sequence[str]) -> int:
    """Print the command line and run it in this process."""
    module = f"valor.trainer.main_{command}"
    say(" \\\n    ".join([f"  python -m {module}", *map(shlex.quote, overrides)]))
    return import_module(module).main(list(overrides))
