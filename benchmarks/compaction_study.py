"""Where memory exceeds the context: is a summary worth training, and does that need a critic? The best answer is known.

    python benchmarks/compaction_study.py --out runs/compaction           # 4 arms of 8 seeds, about 40 s of CPU each
    python benchmarks/compaction_study.py --out runs/compaction --table   # the table of the runs that are there

Two keys are told early, each with a digit (`a3`, `b7`), then noise (`x5`); in its last turn the policy is asked for one
of them (`a?`). A row ends before that. Without compaction the question is never read: 0. With it the policy is asked
for notes after its fourth turn, and reads nothing else of what came before. The warm start copies a digit into its
notes in six of ten cases and answers from them; so the best policy scores 1, and by how many of the two digits in the
notes are right the value of what follows is exactly 0.1, 0.55 or 1, for a policy that guesses what it does not know.
`--luck` is the standard deviation of what the noise adds to an outcome: a group's mean does not see it, a critic can.

Arms, with the same episodes a step and (but for `none`) the same tokens: no compaction; summaries with advantage 0;
all tokens by the mean of a group; all tokens by GAE over the cut.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from scipy import stats

from valor.agents import Env, Step
from valor.config import PPOConfig
from valor.data.batch import Batch, Episodes
from valor.data.files import write_parquet
from valor.lab import arithmetic
from valor.lab.sweep import main as sweep
from valor.trainer.main_sft import main as sft
from valor.trainer.phases.advantages import Advantages
from valor.trainer.phases.base import EVERY_COLUMN, Metrics, Phase

SOURCE, TURNS, KEYS = "valor/notes", 8, "ab"
ACCURACY = f"val-core/{SOURCE}/reward/mean@1"
COPIED = 0.6  # how often the warm start's notes have the digit that was told
ROW, STEPS, SFT_STEPS, PROMPTS = 34, 40, 240, 48
NOISE_STD = 4.97  # of the sum of three digits
FILE = Path(__file__).resolve()
COMPACTION = {
    "enable": True,
    "turn_length": 3,
    "summary_length": 3,
    "request": "'#'",
    "summary": "'{summary}'",
}
COMPACT = {f"actor_rollout_ref.rollout.agent.compaction.{key}": value for key, value in COMPACTION.items()}
ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "untrained": {**COMPACT, "algorithm.phases_path": str(FILE)},
    "group": {**COMPACT, "algorithm.adv_estimator": "grpo", "trainer.critic_warmup": 0},
    "gae": {**COMPACT},
}
CONTROL = "group"


class Notes(Env):
    """Tells two digits and noise, and asks for one of the digits at the end. 1 for the right one."""

    def __init__(self, luck: float) -> None:
        self.luck = luck

    def reset(self, row: Mapping[str, Any]) -> None:
        draw = random.Random(row["extra_info"]["seed"])
        self.told = {key: str(draw.randrange(10)) for key in KEYS}
        self.asked, self.noise = draw.choice(KEYS), [draw.randrange(10) for _ in range(TURNS - 4)]
        self.turns, self.right = 0, 0.0
        self.validates = row["extra_info"]["validates"]

    def step(self, text: str) -> Step:
        self.turns += 1
        if self.turns == TURNS:
            self.right = float(text == self.told[self.asked])
            return Step("", done=True)
        says = [*(key + digit for key, digit in self.told.items()), *(f"x{n}" for n in self.noise), f"{self.asked}?"]
        return Step(says[self.turns - 1])

    def score(self) -> float:
        noise = (sum(self.noise[1:]) - 13.5) / NOISE_STD
        return self.right + (0.0 if self.validates else self.luck * noise)


class SummariesUntrained(Phase):
    """Advantage 0 on the tokens of summaries: their log-probs stay in the batch, and nothing is learnt from them."""

    name = "summaries_untrained"
    reads = EVERY_COLUMN
    adds = frozenset(("advantages",))

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        advantages, infos = batch["advantages"].clone(), batch.objects["episode_info"]
        for rows in Episodes(batch).rows:
            for cut in infos[rows[0]].get("compactions", ()):
                for row in rows:
                    advantages[row][batch["turn_ids"][row] == cut["turn"]] = 0.0
        return Batch({"advantages": advantages}), {}


def phases(standard: list[Phase], config: PPOConfig) -> list[Phase]:
    """The standard list, with summaries left out behind the advantages."""
    at = next(i for i, phase in enumerate(standard) if isinstance(phase, Advantages)) + 1
    return [*standard[:at], SummariesUntrained(config), *standard[at:]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compaction: none, untrained, by a group's mean, by GAE over the cut.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--luck", type=float, default=1.0, help="standard deviation of what notes have no part in")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of the runs")
    args = parser.parse_intermixed_args()
    name, code = f"luck_{args.luck:g}", 0
    if not args.table:
        settings = sweep_of(args.out, name, warm_start(args.out), args.luck)
        file = args.out / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**settings, "seeds": list(range(args.seeds)), "parallel": args.parallel}))
        code = sweep([str(file), *args.overrides])
    if not code:
        print(table(args.out / name, args.seeds))
    return code


def warm_start(out: Path) -> Path:
    """Data, and a model that knows the form of an episode, takes notes that are often wrong, and answers from notes."""
    trained = out / "sft" / "huggingface" / "actor"
    if trained.is_dir():
        return trained
    arithmetic.make_model(out / "model", initializer_range=0.06)
    rng = random.Random(0)
    for split, count in (("train", PROMPTS), ("val", 4 * PROMPTS)):
        rows = [
            {
                "data_source": SOURCE,
                "prompt": [{"role": "user", "content": "."}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"seed": (split == "val") * 10**6 + i, "validates": split == "val"},
            }
            for i in range(count)
        ]
        write_parquet({out / f"{split}.parquet": rows})
    write_parquet({out / "sft.parquet": [{"messages": chat} for _ in range(4000) for chat in demonstration(rng)]})
    settings = ["data.max_length=64", "data.train_batch_size=64", "optim.lr=4e-3", "optim.betas=[0.9,0.95]"]
    settings += ["optim.lr_scheduler_type=cosine", "optim.lr_warmup_steps=10", f"data.train_files={out}/sft.parquet"]
    settings += ["fsdp_config.dtype=float32", "trainer.device=cpu", "trainer.num_threads=1", f"model.path={out}/model"]
    settings += [f"trainer.total_training_steps={SFT_STEPS}", f"trainer.default_local_dir={out}/sft"]
    if sft([*settings, "trainer.resume_mode=disable"]):
        raise SystemExit("the warm start failed")
    return trained


def demonstration(rng: random.Random) -> list[list[dict[str, str]]]:
    """The two rows of an episode: up to the notes, some of which are wrong, and from the notes to the answer."""
    told = {key: str(rng.randrange(10)) for key in KEYS}
    notes = {key: digit if rng.random() < COPIED else str(rng.randrange(10)) for key, digit in told.items()}
    noise, asked = [f"x{rng.randrange(10)}" for _ in range(TURNS - 4)], rng.choice(KEYS)
    text = "".join(notes.values())
    first = [".", *(key + digit for key, digit in told.items()), noise[0], "#"]
    second = [f".\n{text}\n{noise[1]}", *noise[2:], f"{asked}?"]
    rows = zip(first, [*"....", text], strict=True), zip(second, [*"...", notes[asked]], strict=True)
    return [[message for asks, says in row for message in turn(asks, says)] for row in rows]


def turn(asks: str, says: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asks}, {"role": "assistant", "content": says}]


def sweep_of(out: Path, name: str, start: Path, luck: float) -> dict[str, Any]:
    """The sweep: the same 96 episodes a step, and the same learning rate, for all arms."""
    agent = "actor_rollout_ref.rollout.agent"
    base = {
        "data.train_files": str(out / "train.parquet"),
        "data.val_files": str(out / "val.parquet"),
        "data.train_batch_size": 12,
        "data.max_prompt_length": 16,
        "data.max_response_length": ROW,
        "actor_rollout_ref.model.path": str(start),
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.actor.optim.lr": 3e-4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 6,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.max_model_len": 64,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
        f"{agent}.environment": f"{FILE}:Notes",
        f"{agent}.environment_kwargs": {"luck": luck},
        f"{agent}.deterministic": True,
        "critic.optim.lr": 1e-3,
        "critic.fsdp_config.dtype": "float32",
        "critic.model.enable_gradient_checkpointing": False,
        "critic.ppo_mini_batch_size": 3,
        "trainer.critic_warmup": 3,
        "trainer.total_training_steps": STEPS,
        "trainer.test_freq": 5,
        "trainer.device": "cpu",
        "trainer.num_threads": 1,
        "trainer.log_generations": 96,
        "trainer.report": False,
    }
    return {"name": f"compaction_{name}", "base": base, "arms": ARMS, "control": CONTROL, "out": str(out / name)}


def table(runs: Path, seeds: int) -> str:
    """A line an arm: right answers at the end and along the run, the latter also against the group's, tokens, and the
    critic's value after the cut by how many digits of the notes are right."""
    heads = ["arm", "at the end", "by seed", "along the run", f"against {CONTROL}", "policy tokens an episode"]
    heads += ["V after notes with 0, 1, 2 right (exact for a perfect reader: 0.10, 0.55, 1.00)"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    curves = {arm: [curve(runs / arm / f"seed_{seed}") for seed in range(seeds)] for arm in ARMS}
    along = {arm: [statistics.fmean(values) for values in of] for arm, of in curves.items()}
    for arm, of in curves.items():
        folders, ends = [runs / arm / f"seed_{seed}" for seed in range(seeds)], [values[-1] for values in of]
        against = [a - b for a, b in zip(along[arm], along[CONTROL], strict=True)]
        tokens = [row["episode/policy_tokens"] for folder in folders for row in metrics(folder) if row["step"] > 0]
        cells = [arm, interval(ends), " ".join(f"{end:.2f}" for end in ends), interval(along[arm])]
        cells += ["" if arm == CONTROL else interval(against), f"{statistics.fmean(tokens):.1f}"]
        lines.append(f"| {' | '.join([*cells, values_after_notes(folders)])} |")
    return "\n".join(lines)


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> list[float]:
    """Right answers in validation, after the start."""
    return [row[ACCURACY] for row in metrics(folder) if ACCURACY in row and row["step"]]


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval of Student's t over the seeds."""
    if len(values) < 2:
        return f"{statistics.fmean(values):.3f}"
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.3f} ± {half:.3f}"


def values_after_notes(folders: Sequence[Path]) -> str:
    """Means over the last step's episodes; luck that is still to come has mean 0."""
    by_right: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for folder in folders:
        last = folder / "samples" / f"step_{STEPS}.jsonl"
        for row in map(json.loads, last.read_text().splitlines() if last.exists() else ()):
            cuts = row["episode"].get("compactions")
            if not cuts or not row.get("values") or cuts[0]["turn"] + 1 not in row["turns"]:
                continue
            text = "".join(token for token, turn in zip(row["tokens"], row["turns"], strict=True) if turn <= 3)
            told = [text[text.find(key) + 1] for key in KEYS if key in text]
            notes = row["episode"]["rows"][0]["prompt"].split("\n")[1][:2]
            right = sum(a == b for a, b in zip(told, notes, strict=False))
            by_right[right].append(row["values"][row["turns"].index(cuts[0]["turn"] + 1)])
    return ", ".join(f"{statistics.fmean(values):.2f}" if values else "-" for values in by_right.values())


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
