"""A long tiny run of PPO whose helpers are killed: the same weights as undisturbed, and nothing that grows.

python benchmarks/soak.py --out runs/soak                  # 2,000 steps twice: a kill every 50 steps, then none
python benchmarks/soak.py --out runs/soak --steps 200      # shorter

Prints resident memory (MB), open files and threads of the run's own process, and the number of its helpers, after
every tenth of the steps. Exit code 1 when the weights differ, or when memory after the last tenth is more than 10 %
above that after the second, or files or threads are more by ten.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from valor.lab import arithmetic


def command(root: Path, run_dir: Path, steps: int) -> list[str]:
    """The run, whose model and data are made in `root`."""
    model = arithmetic.make_model(root / "model", seed=0)
    files = arithmetic.make_data(root / "data", seed=0, num_val=16, num_demonstrations=1, num_sft_val=1)
    return [
        *(sys.executable, "-m", "valor", "ppo", f"data.train_files={files.train}", "data.train_max_samples=256"),
        *("data.train_batch_size=8", "data.max_prompt_length=32", "data.max_response_length=8"),
        *(f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
        *("actor_rollout_ref.actor.optim.lr=1e-4", "actor_rollout_ref.actor.fsdp_config.dtype=float32"),
        *("actor_rollout_ref.model.enable_gradient_checkpointing=false", "critic.optim.lr=1e-4"),
        *("critic.model.enable_gradient_checkpointing=false", "reward.num_workers=2", "trainer.report=false"),
        *("trainer.device=cpu", "trainer.num_threads=1", "trainer.save_freq=500", "trainer.max_ckpt_to_keep=1"),
        *(f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={run_dir}"),
        *("trainer.resume_mode=disable",),
    ]


def steps_done(run_dir: Path) -> int:
    """By the metrics that are there."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return json.loads(lines[-1]).get("step", 0) if lines else 0


def helpers(process: psutil.Process) -> list[psutil.Process]:
    """The graders: what multiprocessing's server of processes has started."""
    servers = [child for child in process.children() if "forkserver" in " ".join(child.cmdline())]
    return [grader for server in servers for grader in server.children()]


def run(words: list[str], run_dir: Path, steps: int, every: int, draw: random.Random) -> list[tuple[int, ...]]:
    """Run to the end, killing a helper every so many steps (0: never); (step, memory, files, threads) along the way."""
    with open(run_dir.with_suffix(".log"), "w") as log:
        started = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    process, measured, next_kill, next_look = psutil.Process(started.pid), [], every, steps // 10
    while started.poll() is None:
        time.sleep(0.2)
        step = steps_done(run_dir)
        with suppress(psutil.Error):
            if every and step >= next_kill and (found := helpers(process)):
                draw.choice(found).kill()
                next_kill += every
            if step >= next_look:
                next_look += steps // 10
                row = step, process.memory_info().rss >> 20, process.num_fds(), process.num_threads()
                measured.append(row)
                print(f"step {row[0]:5}  {row[1]:5} MB  {row[2]:3} files  {row[3]:3} threads  {len(helpers(process))}")
    assert started.returncode == 0, f"the run failed: see {run_dir.with_suffix('.log')}"
    print(f"{next_kill // every - 1 if every else 0} helpers were killed", flush=True)
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50, help="steps between two kills")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    folders = {"killed": args.every, "undisturbed": 0}
    measured = {
        name: run(
            command(args.out, args.out / name, args.steps), args.out / name, args.steps, every, random.Random(args.seed)
        )
        for name, every in folders.items()
    }
    weights = [
        [(args.out / name / "huggingface" / role / "model.safetensors").read_bytes() for role in ("actor", "critic")]
        for name in folders
    ]
    rows = measured["killed"]
    grown = rows[-1][1] > 1.1 * rows[1][1] or any(rows[-1][i] > rows[1][i] + 10 for i in (2, 3))
    print(
        f"weights {'equal' if weights[0] == weights[1] else 'DIFFER'}",
        "something GROWS" if grown else "nothing grows",
        sep=", ",
    )
    return int(weights[0] != weights[1] or grown)


if __name__ == "__main__":
    sys.exit(main())
