#!/usr/bin/env python3
"""Does each estimator learn? Nine of them on the embedded arithmetic task, from one SFT warm start, over seeds.

    python benchmarks/learning_table.py --out RUNS_DIR [--seeds 0 1 2] [--only grpo gae] [--steps 60] [--minutes 15]

All runs see the same number of samples a step and take the same number of updates; estimators that compare samples of
one prompt draw eight of each, the others one. Accuracy is greedy, on problems that no other file holds. Finished runs
are kept and not repeated, no run is started after `--minutes`, and the table is written after each:
benchmarks/results/learning_table.md.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from valor.algorithms import ADVANTAGES
from valor.lab import arithmetic
from valor.lab.demo import ppo_overrides, read_accuracy, sft_overrides
from valor.trainer.main_ppo import main as train
from valor.trainer.main_sft import main as warm_start

TABLE = Path(__file__).parent / "results" / "learning_table.md"
ACTOR = "actor_rollout_ref.actor"
# Each estimator with the settings its paper pairs it with.
ALGORITHMS: dict[str, list[str]] = {
    "gae": [],
    "grpo": [],
    "DrGRPO": [
        "algorithm.adv_estimator=grpo",
        "algorithm.norm_adv_by_std_in_grpo=false",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    ],
    "rloo": [],
    "reinforce_plus_plus": [],
    "reinforce_plus_plus_baseline": [],
    "remax": [],
    "opo": [],
    "gpg": [f"{ACTOR}.policy_loss.loss_mode=gpg"],
}


@dataclass(frozen=True)
class Result:
    """One run: validation accuracy before and after, and its training time."""

    seed: int
    before: float
    after: float
    minutes: float


def settings(name: str) -> tuple[str, list[str]]:
    """The kind of the demonstration's run (samples per prompt and updates), and what differs from it."""
    estimator = "grpo" if name == "DrGRPO" else name
    groups = ADVANTAGES[estimator].capability.min_group_size > 1
    return "grpo" if groups else "ppo", [f"algorithm.adv_estimator={estimator}", *ALGORITHMS[name]]


def run(name: str, seed: int, start: Path, files: arithmetic.DataFiles, out: Path, steps: int) -> Result:
    """Train unless a finished run lies there; read what came of it."""
    run_dir = out / f"{name}-seed{seed}"
    kind, own = settings(name)
    if not (run_dir / "huggingface" / "actor").is_dir():
        length = [f"trainer.total_training_steps={steps}", "trainer.test_freq=20", "trainer.report=false"]
        code = train([*ppo_overrides(start, files, run_dir, kind, seed), *length, *own])
        if code:
            raise SystemExit(f"{name}, seed {seed}: exit code {code}")
    before, after = read_accuracy(run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(line.get("timing_s/step", 0.0) + line.get("timing_s/testing", 0.0) for line in lines)
    return Result(seed, before.validation, after.validation, seconds / 60)


def table(results: dict[str, list[Result]], steps: int) -> str:
    """Markdown: a row an algorithm, means over seeds and their range."""
    lines = [
        "# Nine estimators on the embedded arithmetic task",
        "",
        f"`benchmarks/learning_table.py`: a 0.6M-parameter model after the warm start of `valor demo`, {steps} steps "
        "of 256 samples and four updates, greedy accuracy on 256 problems kept apart. Minutes are training time on a "
        "CPU that other work shared.",
        "",
        "| algorithm | samples a prompt | seeds | before | after, mean | after, range | least gain | minutes a run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        if not runs:
            lines.append(f"| {name} | {_samples(name)} | 0 | | | | | |")
            continue
        after = [r.after for r in runs]
        lines.append(
            f"| {name} | {_samples(name)} | {len(runs)} | {_mean([r.before for r in runs]):.3f} | {_mean(after):.3f} "
            f"| {min(after):.3f} to {max(after):.3f} | {min(r.after - r.before for r in runs):+.3f} "
            f"| {_mean([r.minutes for r in runs]):.1f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    args = parser.parse_args(argv)
    began = time.monotonic()
    model, files = arithmetic.make_model(args.out / "model"), arithmetic.make_data(args.out / "data")
    start = args.out / "sft" / "huggingface" / "actor"
    if not start.is_dir() and warm_start(sft_overrides(model, files, args.out / "sft", seed=0)):
        raise SystemExit("the warm start failed")
    results: dict[str, list[Result]] = {name: [] for name in ALGORITHMS}
    for seed in args.seeds:
        for name in args.only:
            finished = (args.out / f"{name}-seed{seed}" / "huggingface" / "actor").is_dir()
            if not finished and time.monotonic() - began > 60 * args.minutes:
                continue
            results[name].append(run(name, seed, start, files, args.out, args.steps))
            TABLE.parent.mkdir(parents=True, exist_ok=True)
            TABLE.write_text(table(results, args.steps))
    print(table(results, args.steps))


def _samples(name: str) -> int:
    return 8 if settings(name)[0] == "grpo" else 1


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
