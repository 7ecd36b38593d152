#!/usr/bin/env python3
"""What algorithms cost and what they reach: time by phase, memory, and tokens to a target, on one model and its data.

    python benchmarks/algorithm_costs.py --model SMOLLM2_DIR --out runs/costs              # any causal language model
    python benchmarks/algorithm_costs.py --model SMOLLM2_DIR --out runs/costs --table      # of the runs that are there

One-digit sums and differences (smollm2_arithmetic.py), 32 prompts x 4 samples a step. All arms see the same prompts;
all settings but the estimator's own, and the critic where there is one, are the same. Seconds are medians over the
steps after the second. Tokens to the target: of prompts and responses, until the mean score of five steps reaches it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml

from smollm2_arithmetic import write_questions
from valor.lab.sweep import main as sweep

ARMS = {"ppo": "gae", "grpo": "grpo", "rloo": "rloo", "reinforce++": "reinforce_plus_plus"}
PHASES = {"gen": "generate", "reward": "grade", "values": "values", "update_critic": "critic", "update_actor": "policy"}
WINDOW = 5  # steps whose mean score has to reach the target


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What all arms share."""
    train_file, val_file = write_questions(args.out / "data")
    actor = "actor_rollout_ref"
    return {
        "data.train_files": str(train_file),
        "data.val_files": str(val_file),
        "data.train_batch_size": 32,
        "data.max_prompt_length": 64,
        "data.max_response_length": 12,
        f"{actor}.model.path": str(args.model),
        f"{actor}.model.enable_gradient_checkpointing": False,
        f"{actor}.actor.ppo_mini_batch_size": 32,
        f"{actor}.actor.optim.lr": 1e-5,
        f"{actor}.actor.ppo_max_token_len_per_gpu": 8192,
        f"{actor}.rollout.n": 4,
        f"{actor}.rollout.val_kwargs.n": 4,
        f"{actor}.rollout.val_kwargs.temperature": 1.0,
        f"{actor}.rollout.val_kwargs.do_sample": True,
        "trainer.test_freq": -1,
        "trainer.total_training_steps": args.steps,
        "trainer.report": False,
    }


def arms() -> dict[str, dict[str, Any]]:
    """The estimators, and the critic of the one that has it."""
    critic = {"critic.optim.lr": 5e-5, "critic.ppo_max_token_len_per_gpu": 8192, "algorithm.lam": 1.0}
    critic |= {"critic.model.enable_gradient_checkpointing": False, "trainer.critic_warmup": 2}
    return {
        name: {"algorithm.adv_estimator": estimator, **(critic if name == "ppo" else {})}
        for name, estimator in ARMS.items()
    }


def table(out: Path, seeds: int, target: float) -> str:
    """A line an arm."""
    heads = ["", "seconds a step", *PHASES.values(), "GiB", f"steps to {target}", "tokens", "seconds", "last five"]
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for arm in ARMS:
        files = [out / arm / f"seed_{seed}" / "metrics.jsonl" for seed in range(seeds)]
        runs = [steps(file) for file in files if file.is_file()]
        if not runs:
            continue
        later = [row for run in runs for row in run[2:]]

        def median(key: str, later: list[dict[str, Any]] = later) -> str:
            found = [row[key] for row in later if key in row]
            return f"{statistics.median(found):.2f}" if found else ""

        held = max(value for row in later for key, value in row.items() if key.startswith("perf/peak_rss_gb/"))
        reached = [to_target(run, target) for run in runs]
        cells = [arm, median("timing_s/step"), *(median(f"timing_s/{phase}") for phase in PHASES), f"{held:.2f}"]
        cells += [" ".join(f"{one[i]:,.0f}" if one else "-" for one in reached) for i in range(3)]
        cells.append(" ".join(f"{statistics.fmean(scores(run)[-WINDOW:]):.2f}" for run in runs))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def steps(file: Path) -> list[dict[str, Any]]:
    """The metrics of a run's steps."""
    return [row for row in map(json.loads, file.read_text().splitlines()) if "critic/score/mean" in row]


def scores(run: list[dict[str, Any]]) -> list[float]:
    return [row["critic/score/mean"] for row in run]


def to_target(run: list[dict[str, Any]], target: float) -> tuple[int, float, float] | None:
    """Steps, tokens and seconds until the mean score of the last steps is `target`; None: it never is."""
    for end in range(WINDOW, len(run) + 1):
        if statistics.fmean(scores(run)[end - WINDOW : end]) >= target:
            sums = [sum(row[key] for row in run[:end]) for key in ("perf/total_num_tokens", "timing_s/step")]
            return end, *sums
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--target", type=float, default=0.6)
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of the runs")
    args = parser.parse_intermixed_args()
    code, runs = 0, args.out / "runs"
    if not args.table:
        file = args.out / "costs.yaml"
        args.out.mkdir(parents=True, exist_ok=True)
        tree = {"base": settings(args), "arms": arms(), "seeds": list(range(args.seeds)), "control": "grpo"}
        file.write_text(yaml.safe_dump({**tree, "name": "costs", "out": str(runs)}, sort_keys=False))
        code = sweep([str(file), *args.overrides])
    if not code:
        print(table(runs, args.seeds, args.target))
    return code


if __name__ == "__main__":
    sys.exit(main())
