"""Does a critic help a real model with tools that fail? SmolLM2-135M looks up numbers in four archives.

    python benchmarks/smollm2_search.py --model SMOLLM2_DIR --out runs/smollm2_search [--seeds 3] [--parallel 1]

A question asks for the number of a made-up name, which cannot be known. The policy may search an archive, and is told
the number or that nothing was found; then it may search again or answer. Three turns at most. Archives find nothing in
nine, eight, six and three of ten cases, which nobody says. The warm start imitates a teacher who guesses in seven of
ten of his turns before he knows the number, and else takes an archive at random; a guess is right once in 90. Whether a
search fails is luck that a critic reads and a group's mean does not. The samples, the policy's learning rate and the
number of updates are the same in all arms; nothing has a warm-up. Validation: names that no other question has, at
temperature 1, the archives failing as in training. By the best policy 0.91 of the answers are right, by one that always
searches at random 0.58.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from valor.agents import Env, Step
from valor.data.files import write_parquet
from valor.lab import lookup
from valor.lab.statistics import bootstrap_interval
from valor.lab.sweep import main as sweep
from valor.trainer.main_sft import main as sft

SOURCE, TURNS, GUESSES = "valor/failing_tools", 3, 0.7
FAILS = {"a": 0.9, "b": 0.8, "c": 0.6, "d": 0.3}  # by archive
ACCURACY = f"val-core/{SOURCE}/reward/mean@1"
PROMPTS, GROUP, VALIDATION = 4, 8, 96
NOTHING = "nothing found"
FILE = Path(__file__).resolve()
POLICY = "actor_rollout_ref"
ARMS: dict[str, dict[str, Any]] = {
    "GRPO": {"algorithm.adv_estimator": "grpo"},
    "closed_form": {"critic.kind": "probe", "algorithm.lam": 0.9},
    "PPO": {"critic.optim.lr": 5e-5, "algorithm.lam": 0.9, "algorithm.lam_critic": 1.0},
}


class FailingTools(Env):
    """Answers `search a NAME` with the name's number or, by luck, with nothing; `answer N` ends the episode."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.luck = random.Random(str(row["episode_key"]))
        self.name, self.number, self.turns = row["extra_info"]["name"], row["ground_truth"], 0

    def step(self, text: str) -> Step:
        if answer := re.fullmatch(r"answer (\d\d)", text.strip()):
            return Step("", float(answer[1] == self.number), True)
        search = re.fullmatch(rf"search ([a-d]) {self.name}", text.strip())
        self.turns += 1
        if search is None or self.turns == TURNS:
            return Step("", 0.0, True)
        return Step(result(self.luck, search[1], self.name, self.number))


def result(luck: random.Random, archive: str, name: str, number: object) -> str:
    return NOTHING if luck.random() < FAILS[archive] else f"{name} {number}"


def question(name: str) -> str:
    return f"Number of {name}?"


def demonstration(rng: random.Random, name: str, number: int) -> list[dict[str, str]]:
    """One chat of the teacher's."""
    chat, heard = [], question(name)
    for turn in range(TURNS):
        knows = heard == f"{name} {number}"
        if knows or rng.random() < GUESSES or turn == TURNS - 1:
            says = f"answer {number if knows else rng.choice(lookup.NUMBERS)}"
        else:
            says = f"search {(archive := rng.choice([*FAILS]))} {name}"
        chat += [{"role": "user", "content": heard}, {"role": "assistant", "content": says}]
        if says.startswith("answer"):
            break
        heard = result(rng, archive, name, number)
    return chat


def warm_start(out: Path, model: str) -> Path:
    """Data, and the policy after the teacher's demonstrations."""
    trained = out / "sft" / "huggingface" / "actor"
    if trained.is_dir():
        return trained
    rng = random.Random(0)
    facts = lookup.make_facts(rng, 2000 + VALIDATION)
    for split, some in (("train", facts[:2000]), ("val", facts[2000:])):
        rows = [
            {
                "data_source": SOURCE,
                "prompt": [{"role": "user", "content": question(name)}],
                "reward_model": {"style": "rule", "ground_truth": str(number)},
                "extra_info": {"name": name},
            }
            for name, number in some
        ]
        write_parquet({out / f"{split}.parquet": rows})
    chats = [{"messages": demonstration(rng, *rng.choice(facts[:2000]))} for _ in range(1600)]
    write_parquet({out / "sft.parquet": chats})
    settings = ["data.max_length=160", "data.train_batch_size=16", "optim.lr=5e-5", "trainer.device=cpu"]
    settings += [f"data.train_files={out}/sft.parquet", f"model.path={model}", "trainer.total_training_steps=100"]
    settings += ["model.enable_gradient_checkpointing=false", f"trainer.default_local_dir={out}/sft"]
    if sft([*settings, "optim.lr_warmup_steps=10", "trainer.resume_mode=disable"]):
        raise SystemExit("the warm start failed")
    return trained


def sweep_of(out: Path, start: Path, steps: int) -> dict[str, Any]:
    base = {
        "data.train_files": str(out / "train.parquet"),
        "data.val_files": str(out / "val.parquet"),
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 64,
        "data.max_response_length": 112,
        f"{POLICY}.model.path": str(start),
        f"{POLICY}.model.enable_gradient_checkpointing": False,
        f"{POLICY}.actor.optim.lr": 2e-5,
        f"{POLICY}.actor.ppo_mini_batch_size": PROMPTS // 2,
        f"{POLICY}.rollout.n": GROUP,
        f"{POLICY}.rollout.val_kwargs.temperature": 1.0,
        f"{POLICY}.rollout.agent.environment": f"{FILE}:FailingTools",
        f"{POLICY}.rollout.agent.deterministic": True,
        "critic.model.enable_gradient_checkpointing": False,
        "critic.ppo_mini_batch_size": PROMPTS // 2,
        "trainer.critic_warmup": 0,
        "trainer.total_training_steps": steps,
        "trainer.test_freq": steps // 3,
        "trainer.save_freq": -1,
        "trainer.device": "cpu",
        "trainer.report": False,
    }
    return {"name": "smollm2_search", "base": base, "arms": ARMS, "control": "GRPO", "out": str(out / "runs")}


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def table(runs: Path, arms: Sequence[str], seeds: Sequence[int]) -> str:
    """A line an arm: accuracy before and after each third of the steps; the mean reward of all samples of training, and
    by seed against GRPO's; tokens and seconds of a step."""
    lines = [
        "| arm | accuracy: before, after each third | at the end, by seed | mean reward of training | minus GRPO's "
        "| sampled tokens | seconds a step |",
        "|---|---|---|---|---|---|---|",
    ]
    rewards: dict[str, list[float]] = {}
    for arm in arms:
        rows = [metrics(runs / arm / f"seed_{seed}") for seed in seeds]
        curves = [[row[ACCURACY] for row in run if ACCURACY in row] for run in rows]
        steps = [[row for row in run if "critic/score/mean" in row] for run in rows]
        rewards[arm] = [statistics.fmean(row["critic/score/mean"] for row in run) for run in steps]
        gaps = [a - b for a, b in zip(rewards[arm], rewards["GRPO"], strict=True)]
        interval = bootstrap_interval(gaps)
        against = f"{statistics.fmean(gaps):.3f}" + (
            "" if interval is None else " ({:.3f} to {:.3f})".format(*interval)
        )
        tokens = statistics.fmean(sum(row["episode/policy_tokens"] for row in run) * PROMPTS * GROUP for run in steps)
        cells = [
            arm,
            ", ".join(f"{statistics.fmean(column):.3f}" for column in zip(*curves, strict=True)),
            " ".join(f"{curve[-1]:.2f}" for curve in curves),
            f"{statistics.fmean(rewards[arm]):.3f}",
            "" if arm == "GRPO" else against,
            f"{tokens:,.0f}",
            f"{statistics.median(row['timing_s/step'] for run in steps for row in run):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--arms", nargs="+", default=[*ARMS], choices=[*ARMS])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of the runs")
    args = parser.parse_intermixed_args()
    settings, file = sweep_of(args.out, warm_start(args.out, args.model), args.steps), args.out / "sweep.yaml"
    settings["arms"] = {arm: ARMS[arm] for arm in args.arms}
    file.write_text(
        yaml.safe_dump({**settings, "seeds": list(range(args.seeds)), "parallel": args.parallel}, sort_keys=False)
    )
    code = sweep([str(file), *args.overrides])
    if not code:
        print(table(args.out / "runs", args.arms, range(args.seeds)))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
