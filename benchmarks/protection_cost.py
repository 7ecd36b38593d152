#!/usr/bin/env python3
"""What it costs a PPO step that a run cannot be lost or poisoned: seconds with and without, in turn, in one process.

    python benchmarks/protection_cost.py --out runs/cost --demo                     # the demo's model and settings
    python benchmarks/protection_cost.py --out runs/cost --model SMOLLM2_DIR --steps 40
    python benchmarks/protection_cost.py --out runs/cost --demo key=value ...       # further settings of the run

Without means that these do nothing: the norm of the weights after each update, the search for log-probs that are not
finite, the random number that a grader's reply must carry; and of a checkpoint the search for numbers that are not
finite, its manifest with SHA-256, and the look at free space. The state that a refused step would be saved with
(`state_dict`) is counted, but noted in both cases, and files are flushed to disk in both. The lock of the run folder is
taken once a run and costs a step nothing.

Steps are switched in the order with, without, without, with; the first four and those with a validation are left out.
Prints the median seconds of a step and of a checkpoint, with and without, and which share of the seconds with is spent
in what is switched: a number that other work on the machine hardly disturbs.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smollm2_arithmetic import write_questions
from valor.engines import checkpoint
from valor.engines.fsdp.engine import FSDPEngine
from valor.lab import arithmetic
from valor.lab.demo import ppo_overrides
from valor.rewards import process
from valor.trainer import checkpoints
from valor.trainer.main_ppo import main as train
from valor.trainer.ppo import PPORun


class Switch:
    """Functions that do their work or nothing, and the seconds spent in them."""

    def __init__(self) -> None:
        self.on = True
        self.spent: dict[str, float] = defaultdict(float)

    def add(self, owner: Any, name: str, instead: Any = None, *, always: bool = False) -> None:
        """From now on `owner.name` gives `instead` while the switch is off; with `always` they are only counted."""
        work: Callable[..., Any] = getattr(owner, name)

        def switched(*args: Any, **kwargs: Any) -> Any:
            if not (self.on or always):
                return instead
            began = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self.spent[name] += time.perf_counter() - began

        setattr(owner, name, switched)


class Measured:
    """Seconds of every step and every checkpoint, by whether the switch was on, with what it had to do in them."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch
        self.seconds: dict[tuple[str, bool], list[float]] = defaultdict(list)
        self.shares: dict[str, list[float]] = defaultdict(list)
        self.parts: dict[tuple[str, str], float] = defaultdict(float)

    def add(self, owner: Any, name: str, what: str) -> None:
        """Time the calls of a method of a run; `what`: step or checkpoint."""
        work: Callable[..., Any] = getattr(owner, name)

        def timed(run: PPORun, *args: Any) -> Any:
            number = run.step + (what == "step")
            self.switch.on = number % 4 in (0, 1)
            self.switch.spent.clear()
            began = time.perf_counter()
            result = work(run, *args)
            if what == "checkpoint" or number > 4:
                self._note(what, time.perf_counter() - began)
            self.switch.on = True
            return result

        setattr(owner, name, timed)

    def _note(self, what: str, seconds: float) -> None:
        self.seconds[what, self.switch.on].append(seconds)
        if self.switch.on:
            self.shares[what].append(sum(self.switch.spent.values()) / seconds)
            for name, spent in self.switch.spent.items():
                self.parts[what, name] += spent

    def show(self, save_every: int) -> None:
        """Print the table; its last line is a step with its part of a checkpoint every `save_every` steps."""
        print(f"\n{'':12}{'with':>10}{'without':>10}{'change':>9}{'share':>8}  calls with and without; where")
        total = spent = 0.0
        for what, parts_of_it in (("step", 1), ("checkpoint", save_every)):
            on, off = self.seconds[what, True], self.seconds[what, False]
            a, b = statistics.median(on), statistics.median(off)
            parts = ", ".join(f"{n} {s / sum(on):.2%}" for (w, n), s in self.parts.items() if w == what)
            share = statistics.median(self.shares[what])
            total, spent = total + a / parts_of_it, spent + share * a / parts_of_it
            print(f"{what:12}{a:9.4f}s{b:9.4f}s{a / b - 1:+9.1%}{share:8.2%}  {len(on)}, {len(off)}; {parts}")
        print(f"{'both':12}{total:9.4f}s{'':19}{spent / total:8.2%}  a checkpoint every {save_every} steps")


def settings(args: argparse.Namespace) -> list[str]:
    """The run's, without those of the command line."""
    if args.demo:
        model = arithmetic.make_model(args.out / "model", seed=0)
        files = arithmetic.make_data(args.out / "data", seed=0)
        return ppo_overrides(model, files, args.out / "run")
    files = write_questions(args.out / "data")
    both = [("actor_rollout_ref.actor", "actor_rollout_ref.model"), ("critic", "critic.model")]
    return [
        *(f"data.train_files={files[0]}", "data.train_batch_size=32", "data.max_prompt_length=64"),
        *("data.max_response_length=12", "actor_rollout_ref.rollout.n=2", "trainer.device=cpu"),
        *(f"actor_rollout_ref.model.path={args.model}", "actor_rollout_ref.actor.ppo_mini_batch_size=32"),
        *(f"{role}.ppo_max_token_len_per_gpu=4096" for role, _ in both),
        *(f"{model}.enable_gradient_checkpointing=false" for _, model in both),
        f"trainer.default_local_dir={args.out / 'run'}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--save-every", type=int, default=5)
    args, overrides = parser.parse_known_args()
    if args.demo == bool(args.model):
        parser.error("give either --demo or --model")
    switch = Switch()
    switch.add(FSDPEngine, "_weight_norm", 0.0)
    switch.add(process.secrets, "randbits", 1)
    switch.add(checkpoint, "_not_finite")
    switch.add(checkpoints, "write_manifest")
    switch.add(checkpoints.CheckpointStore, "check_space")
    switch.add(PPORun, "state_dict", always=True)
    measured = Measured(switch)
    measured.add(PPORun, "_next_step", "step")
    measured.add(PPORun, "save", "checkpoint")
    saving = f"trainer.save_freq={args.save_every}", "trainer.max_ckpt_to_keep=1", "trainer.resume_mode=disable"
    code = train(
        [
            *settings(args),
            f"trainer.total_training_steps={args.steps}",
            *saving,
            "trainer.report=false",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            *overrides,
        ]
    )
    measured.show(args.save_every)
    return code


if __name__ == "__main__":
    sys.exit(main())
