"""Sampled tokens until carries are learnt, from data of which most rows teach nothing: five ways to draw the rows.

    python benchmarks/curriculum_study.py --out runs/curriculum [--seeds 8] [--write benchmarks/results/curriculum.md]

Of 640 sums eight in ten have no carry (the warm start has them right), one has a carry (it mostly forgets it), and one
has a wrong result for its truth, which nothing reaches. GRPO, 16 prompts of 8 samples a step, one update, from one
warm start; seeds draw rows and samples. Validated after each step, greedily, on 128 unseen sums with a carry. Tokens
are all that were sampled up to the first validation that reaches 0.9, those of dropped groups too.

Arms: `epochs`, each row once an epoch; `dynamic`, groups of equal scores are dropped and others drawn; `difficulty`,
the sampler by recent pass rates; `critic`, the same, where a critic that is trained beside reads rows before their
first answers; `known`, a class that knows which rows have a carry, the bound of what a sampler can save. Means have
95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from scipy import stats

from valor.lab import arithmetic
from valor.lab.demo import sft_overrides
from valor.lab.sweep import main as sweep
from valor.trainer.main_sft import main as sft

GOAL, STEPS, CONTROL = 0.9, 36, "epochs"
ACCURACY = f"val-core/{arithmetic.DATA_SOURCE}/reward/mean@1"
BY_DIFFICULTY = {"data.sampler.difficulty.enable": True}
ARMS: dict[str, dict[str, Any]] = {
    CONTROL: {},
    "dynamic": {  # to the end of the others it would look for groups that differ, which there are no more
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.max_num_gen_batches": 0,
        "trainer.total_training_steps": 20,
    },
    "difficulty": BY_DIFFICULTY,
    "critic": {
        **BY_DIFFICULTY,
        "data.sampler.difficulty.predictor": "critic",
        "critic.enable": True,
        "critic.ppo_mini_batch_size": 8,
        "critic.optim.lr": 1e-3,
        "critic.model.enable_gradient_checkpointing": False,
        "critic.fsdp_config.dtype": "float32",
    },
    "known": {"data.sampler.class_path": str(Path(__file__).resolve()), "data.sampler.class_name": "Carrying"},
}


class Carrying:
    """Numbers of the rows that have a carry and a true result, in an order of their own each epoch."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        self._rows = [i for i in range(len(data_source)) if data_source[i].extra_info["kind"] == "carry"]
        self._random = random.Random(data_config.seed)

    def __iter__(self) -> Iterator[int]:
        return iter(self._random.sample(self._rows, len(self._rows)))


def prepare(out: Path) -> tuple[arithmetic.DataFiles, Path]:
    """The data, and the demo's warm start."""
    files, start = arithmetic.DataFiles.of(out / "data"), out / "sft" / "huggingface" / "actor"
    if start.exists():
        return files, start
    arithmetic.make_model(out / "model")
    arithmetic.make_data(out / "data")
    rng = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    carrying, others = ([p for p in pairs if arithmetic.has_carry(*p) is carry] for carry in (True, False))
    train = [(a, b, a + b, "easy") for a, b in others[:512]]
    train += [(a, b, a + b, "carry") for a, b in carrying[128:192]]
    train += [(a, b, a + b + 7, "wrong") for a, b in carrying[192:256]]
    rng.shuffle(train)
    val = [(a, b, a + b, "carry") for a, b in carrying[:128]]
    for path, rows in ((files.train, train), (files.val, val)):
        questions = ((arithmetic.question(a, b), str(truth), {"kind": kind}) for a, b, truth, kind in rows)
        arithmetic.write_prompts(path, arithmetic.DATA_SOURCE, "math", questions)
    if sft(sft_overrides(out / "model", files, out / "sft", 0)):
        raise SystemExit("the warm start failed")
    return files, start


def sweep_of(out: Path, seeds: int, parallel: int) -> dict[str, Any]:
    files, start = prepare(out)
    base = {
        "data.train_files": str(files.train),
        "data.val_files": str(files.val),
        "data.train_batch_size": 16,
        "actor_rollout_ref.model.path": str(start),
        "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
        "actor_rollout_ref.actor.optim.lr": 5e-5,
        "trainer.total_training_steps": STEPS,
        "trainer.test_freq": 1,
        "trainer.report": False,
        "trainer.log_generations": 0,
        "trainer.save_freq": -1,
    }
    return {
        "name": "curriculum",
        "config_path": str(Path(arithmetic.__file__).with_name("demo_config")),
        "config_name": "grpo",
        "base": base,
        "arms": ARMS,
        "control": CONTROL,
        "seeds": list(range(seeds)),
        "parallel": parallel,
        "out": str(out / "sweep"),
    }


def tokens_to_goal(folder: Path) -> tuple[float, float]:
    """Sampled tokens up to the goal (infinite: never), and the last accuracy."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    sampled, reached = 0.0, float("inf")
    for row in rows:
        prompts = row.get("training/filter_groups/prompts", 16)
        sampled += prompts * 8 * row.get("response_length/mean", 0.0)
        if row.get(ACCURACY, 0.0) >= GOAL and reached == float("inf"):
            reached = sampled
    last = [row[ACCURACY] for row in rows if ACCURACY in row][-1]
    return reached, last


def table(out: Path, seeds: int) -> str:
    lines = [
        "| arm | seeds at 0.9 | tokens to 0.9 | by seed, thousands | saved, paired | accuracy at the end |",
        "|---|---|---|---|---|---|",
    ]
    runs = out / "sweep"
    cells = {arm: [tokens_to_goal(runs / arm / f"seed_{seed}") for seed in range(seeds)] for arm in ARMS}
    for arm, values in cells.items():
        tokens, last = [value[0] for value in values], statistics.fmean(value[1] for value in values)
        saved = [1 - t / base[0] for t, base in zip(tokens, cells[CONTROL], strict=True)]
        every = ", ".join("never" if t == float("inf") else f"{t / 1000:.0f}" for t in tokens)
        solved = [t for t in tokens if t < float("inf")]
        complete = len(solved) == seeds and all(base[0] < float("inf") for base in cells[CONTROL])
        mean = interval(tokens, ",.0f") if len(solved) == seeds else "-"
        against = "-" if arm == CONTROL or not complete else interval(saved, ".0%")
        lines.append(f"| {arm} | {len(solved)} of {seeds} | {mean} | {every} | {against} | {last:.3f} |")
    return "\n".join(lines)


def interval(values: list[float], form: str) -> str:
    """Mean and 95 % interval of Student's t over the seeds."""
    mean, half = statistics.fmean(values), 0.0
    if len(values) > 1:
        half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:{form}} ({mean - half:{form}} to {mean + half:{form}})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/curriculum"))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    file = arguments.out / "sweep.yaml"
    settings = sweep_of(arguments.out, arguments.seeds, arguments.parallel)
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    if code := sweep([str(file)]):
        return code
    text = table(arguments.out, arguments.seeds)
    print(text)
    if arguments.write:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = f"`python benchmarks/curriculum_study.py --seeds {arguments.seeds}`, commit {commit}."
        arguments.write.write_text(f"# Which rows to draw: five samplers\n\n{about}\n\n{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
