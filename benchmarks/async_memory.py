"""Does an asynchronous run stay bounded when one side stalls? Memory, files, threads and queue over 500 steps.

python benchmarks/async_memory.py --out runs/async_memory                        # each side stalled in a run of its own
python benchmarks/async_memory.py --out runs/async_memory --steps 100 --stall trainer

PPO with a critic on the demo's untrained model, 8 prompts a step, generators at most 4 steps ahead. The stalled side's
process is stopped (SIGSTOP) for three of ten seconds. Prints resident memory (MB), open files and threads of the run's
own process and of its two workers, and the greatest queue so far. Exit code 1 when memory of a process after the last
tenth of the steps is more than 10 % above that after the second, or more prompts were there than the limit admits.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import ray

from soak import command
from valor.controller.ray_group import RayGroup
from valor.trainer.main_ppo import main as train

AGE, PROMPTS = 4, 8
STOPPED, GOING = 3.0, 7.0  # seconds
SIDES = {"trainer": "actor", "generator": "rollout"}


class Run:
    """A run in this process, whose workers are known, and what is measured of it."""

    def __init__(self, root: Path, run_dir: Path, steps: int) -> None:
        self.metrics, self.steps, self.pids = run_dir / "metrics.jsonl", steps, {"driver": os.getpid()}
        ahead = ["trainer.v1.trainer_mode=separate_async", f"trainer.v1.sampler.max_off_policy_threshold={AGE}"]
        ahead += [f"trainer.v1.num_warmup_batches={AGE}", "trainer.controller=ray"]
        self.words = [*command(root, run_dir, steps)[4:], *ahead]
        self.ended = threading.Event()
        self.rows: list[dict[str, tuple[int, int, int]]] = []
        self.most = 0

    def train(self, side: str) -> None:
        """To the end, with the stalls."""
        start = RayGroup._start

        def remembered(group: RayGroup) -> None:
            start(group)
            role = "generator" if "rollout" in group.specs else "trainer"
            self.pids[role] = ray.get(group._actors[0].__ray_call__.remote(lambda host: os.getpid()))

        RayGroup._start = remembered  # type: ignore[method-assign]
        threads = [threading.Thread(target=self._stall, args=(side,)), threading.Thread(target=self._measure)]
        for thread in threads:
            thread.start()
        try:
            code = train(self.words)
        finally:
            self.ended.set()
            RayGroup._start = start  # type: ignore[method-assign]
            for thread in threads:
                thread.join()
        if code:
            raise SystemExit(f"the run ended with {code}")

    def _stall(self, side: str) -> None:
        while not self.ended.wait(GOING):
            if not self.metrics.exists():
                continue
            os.kill(self.pids[side], signal.SIGSTOP)
            time.sleep(STOPPED)
            os.kill(self.pids[side], signal.SIGCONT)

    def _measure(self) -> None:
        next_look, read = self.steps // 10, 0
        while not self.ended.wait(0.2):
            if not self.metrics.exists():
                continue
            with self.metrics.open() as file:
                file.seek(read)  # all lines at once would take more memory with every step
                text = file.read()
            text = text[: text.rfind("\n") + 1]
            read += len(text.encode())
            for row in map(json.loads, text.splitlines()):
                self.most = max(self.most, row.get("queue/finished_prompts", 0) + row.get("queue/prompts_in_flight", 0))
                if row.get("step", 0) == next_look:
                    next_look += self.steps // 10
                    self._look(row["step"])

    def _look(self, step: int) -> None:
        found = {name: psutil.Process(pid) for name, pid in self.pids.items()}
        self.rows.append({n: (p.memory_info().rss >> 20, p.num_fds(), p.num_threads()) for n, p in found.items()})
        cells = [f"{name} {' '.join(f'{n:4}' for n in numbers)}" for name, numbers in self.rows[-1].items()]
        print(f"step {step:4}  {'   '.join(cells)}   queue {self.most}", flush=True)

    @property
    def bounded(self) -> bool:
        """Whether nothing grew, and no more prompts were there than a step and the limit's batches ahead."""
        grown = [name for name, now in self.rows[-1].items() if now[0] > 1.1 * self.rows[1][name][0]]
        return not grown and self.most <= (AGE + 1) * PROMPTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--stall", nargs="+", choices=list(SIDES), default=list(SIDES))
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    bounded = []
    for side in args.stall:
        run = Run(args.out, args.out / side, args.steps)
        run.train(side)
        bounded.append(run.bounded)
        print(f"{side} stalled: {'bounded' if run.bounded else 'something GROWS'}", flush=True)
    return int(not all(bounded))


if __name__ == "__main__":
    sys.exit(main())
