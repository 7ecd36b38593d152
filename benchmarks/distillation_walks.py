"""Sampled tokens until a student is as good as its teacher, where eight choices lead to one late score: walks.

    python benchmarks/distillation_walks.py --out runs/distillation_walks [--seeds 8] [--parallel 1] [--demo-size]

All arms begin at one policy that takes doors at random. The teacher is what GRPO makes of it; each of the `two` was
trained on half of the rooms, the best of four by the exact score there, and teaches that half. Students compare whole
distributions: reverse KL, and forward KL where they are updated twice. Policies are scored exactly, by all walks from
all rooms, after every second step. Tokens are the sampled ones up to the first such score that reaches the teacher's,
less a hundredth of what can be won. Seed 100 chooses each arm's samples a step and whether they serve one update or
two; the seeds from 0 on are scored. No warm-up; learning rate 1e-3, and for GRPO `RATES`; GRPO has eight samples to a
prompt.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from distillation_study import median
from valor.rewards.walk import Walk
from walk_values import exact_values
from walks import base, run_arms, scores, shown, trained, warm_start
from which_critic import chance_and_best

LENGTH = 8
WITHIN = 0.01  # of the teacher's share of what can be won
TUNING_SEED = 100
CHECKED = 2  # steps between exact scores
TEACHERS_STEPS = 60
TRIES = 4  # at a teacher of half of the rooms: each must know its half
Size = tuple[int, int]  # samples a step, updates on them
SIZES: dict[str, dict[Size, int]] = {  # steps at most
    "grpo": {(256, 1): 80, (128, 1): 120, (64, 1): 240, (64, 2): 120, (32, 1): 320, (32, 2): 240},
    "teacher": {(4, 1): 240, (2, 1): 320, (2, 2): 320},
    "two": {(4, 1): 240, (2, 1): 640, (4, 2): 160, (2, 2): 320},
}
GRPO = {"algorithm.adv_estimator": "grpo"}
RATES = {False: 1e-3, True: 3e-4}  # of GRPO, by whether the model is the demo's: the larger one loses runs at 1e-3
TEACH = {
    "algorithm.adv_estimator": "grpo",
    "distillation.enabled": True,
    "distillation.distillation_loss.use_task_rewards": False,
    "actor_rollout_ref.rollout.n": 1,
}
LOSS = {1: "reverse_kl", 2: "forward_kl"}  # by updates


@dataclass(frozen=True)
class Study:
    """Data whose rows say which half their room is in; the shared settings; the teachers, by name."""

    out: Path
    walk: Walk
    settings: dict[str, Any]
    teachers: dict[str, Path]
    demo_size: bool

    @classmethod
    def prepare(cls, out: Path, demo_size: bool) -> Study:
        files, policy = warm_start(out, LENGTH, demo_size=demo_size)
        rows = pq.read_table(files.train)
        halves = ["low" if int(prompt[-1]["content"]) < 4 else "high" for prompt in rows["prompt"].to_pylist()]
        extra = [{**info, "half": half} for info, half in zip(rows["extra_info"].to_pylist(), halves, strict=True)]
        rows = rows.set_column(rows.column_names.index("extra_info"), "extra_info", pa.array(extra))
        pq.write_table(rows, files.train)
        settings = {
            **base(files, policy, LENGTH, TEACHERS_STEPS, 0.0),
            "trainer.critic_warmup": 0,
            "trainer.save_freq": -1,
        }
        teachers = {"one": trained(out / "one", settings | GRPO, files.walk) / "actor"}
        for half, rooms in (("low", slice(4)), ("high", slice(4, None))):
            own = out / f"{half}.parquet"
            pq.write_table(rows.filter(pa.array([other == half for other in halves])), own)
            taught = settings | GRPO | {"data.train_files": str(own)}
            tries = [
                trained(out / f"{half}_{seed}", taught | {"trainer.seed": seed}, files.walk) / "actor"
                for seed in range(TRIES)
            ]
            teachers[half] = max(tries, key=lambda actor, rooms=rooms: sum(by_room(files.walk, actor)[rooms]))
        return cls(out, files.walk, settings, teachers, demo_size)

    @property
    def of_two(self) -> float:
        """The share of what can be won of a policy that does in each half what its teacher does."""
        chance, best = chance_and_best(self.walk)
        low, high = (by_room(self.walk, self.teachers[half]) for half in ("low", "high"))
        return (sum([*low[:4], *high[4:]]) / 8 - chance) / (best - chance)

    def own(self, arm: str, size: Size) -> dict[str, Any]:
        """The settings of an arm."""
        samples, updates = size
        prompts = samples // 8 if arm == "grpo" else samples
        own = {
            "trainer.total_training_steps": SIZES[arm][size],
            "trainer.save_freq": CHECKED,
            "data.train_batch_size": prompts,
            "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
            "actor_rollout_ref.actor.ppo_epochs": updates,
        }
        if arm == "grpo":
            return {**GRPO, **own, "actor_rollout_ref.actor.optim.lr": RATES[self.demo_size]}
        names = ("low", "high") if arm == "two" else ("one",)
        paths = {f"distillation.teacher_models.{name}.model_path": str(self.teachers[name]) for name in names}
        if arm == "two":
            paths |= {f"distillation.teacher_models.{name}.key": name for name in names}
            paths["distillation.teacher_key"] = "half"
        return {**TEACH, "distillation.distillation_loss.loss_mode": LOSS[updates], **own, **paths}

    def run(self, arm: str, size: Size, seed: int, parallel: int) -> None:
        run_arms(self.out / "runs", self.settings, {label(arm, size): self.own(arm, size)}, [seed], parallel, self.walk)

    def shares(self, run: Path) -> dict[int, float]:
        """By step: the exact score, between doors at random, 0, and the best walks, 1."""
        chance, best = chance_and_best(self.walk)
        return {step: (found["score"] - chance) / (best - chance) for step, found in sorted(scores(run).items())}

    def tokens_to_goal(self, arm: str, size: Size, seed: int) -> tuple[float, float]:
        """Sampled tokens up to the goal (infinite: never), and the last share."""
        goal = max(self.shares(self.out / "one").values()) - WITHIN
        run = self.out / "runs" / label(arm, size) / f"seed_{seed}"
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        lengths = [row["response_length/mean"] for row in rows if "response_length/mean" in row]
        shares = self.shares(run)
        reached = min((step for step, share in shares.items() if share >= goal), default=None)
        return math.inf if reached is None else size[0] * sum(lengths[:reached]), [*shares.values()][-1]

    def best(self, arm: str) -> Size:
        """The size that needed the fewest tokens with the tuning seed; where none arrived, the nearest."""
        reached = {size: self.tokens_to_goal(arm, size, TUNING_SEED) for size in SIZES[arm]}
        return min(reached, key=lambda size: (reached[size][0], -reached[size][1]))

    def table(self, seeds: range) -> str:
        lines = [
            "| arm | samples a step x updates | share at the end | seeds that arrive | tokens, median "
            "| GRPO's / this, median (95 %) |",
            "|---|---|---|---|---|---|",
        ]
        of_grpo = [self.tokens_to_goal("grpo", self.best("grpo"), seed)[0] for seed in seeds]
        for arm in SIZES:
            reached, last = zip(*(self.tokens_to_goal(arm, self.best(arm), seed) for seed in seeds), strict=True)
            ratios = [0.0 if math.isinf(b) else a / b for a, b in zip(of_grpo, reached, strict=True)]
            arrived = sum(map(math.isfinite, reached))
            lines.append(
                f"| {arm} | {self.best(arm)[0]} x {self.best(arm)[1]} | {shown(last)} | {arrived} of {len(seeds)} "
                f"| {statistics.median(reached):,.0f} | {median(ratios)} |"
            )
        return "\n".join(lines)


def by_room(walk: Walk, policy: Path) -> list[float]:
    """Exact mean score of a policy's walks from each room."""
    states = exact_values(walk, policy)
    return states.value[states.token == 0].tolist()


def label(arm: str, size: Size) -> str:
    return f"{arm}-{size[0]}x{size[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/distillation_walks"))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--demo-size", action="store_true", help="students of the demo's size: three layers of 128")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    study, seeds = Study.prepare(arguments.out, arguments.demo_size), range(arguments.seeds)
    of_teachers = {"one": max(study.shares(arguments.out / "one").values()), "two, each in its half": study.of_two}
    print("shares of the teachers:", of_teachers, flush=True)
    for arm in SIZES:
        for size in SIZES[arm]:
            study.run(arm, size, TUNING_SEED, arguments.parallel)
            print(arm, size, *study.tokens_to_goal(arm, size, TUNING_SEED), flush=True)
    for seed in seeds:
        for arm in SIZES:
            study.run(arm, study.best(arm), seed, arguments.parallel)
    goals = ", ".join(f"{name} {share:.3f}" for name, share in of_teachers.items())
    text = f"Shares of what can be won of the teachers: {goals}.\n\n{study.table(seeds)}"
    print(text)
    if arguments.write:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = f"`python benchmarks/distillation_walks.py --seeds {arguments.seeds}`, commit {commit}."
        arguments.write.write_text(f"# Teachers and GRPO on walks\n\n{about}\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
