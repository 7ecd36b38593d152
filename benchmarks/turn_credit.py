"""Where an early turn decides, which steps should GAE take? Tokens, turns, turns then tokens; and GRPO beside them.

    python benchmarks/turn_credit.py --out runs/turn_credit            # 25 runs of up to 30 s of CPU: 15 minutes
    python benchmarks/turn_credit.py --out runs/turn_credit --luck 2   # as many again
    python benchmarks/turn_credit.py --out runs/turn_credit --table    # the table of the runs that are there

An episode has four turns. In the first the policy is shown a digit and says in which half of the digits it is (`a`
or `b`); that alone is for it to decide. Then it is told three random digits, one a turn, which it repeats. The outcome
is 1 for the right choice, else 0, plus luck: the sum of the three digits, centred and scaled to a standard deviation of
`--luck`. So most of an outcome's variance (four fifths at 1, 94 % at 2) comes after the choice, and is there for a
critic to see. The warm start repeats what it is told; its teacher chose right in six of ten demonstrations.

The three units of GAE lose the same weight from turn to turn: 0.64, which is 0.8 a token in turns of two tokens.
Results, and what they say: results/turn_credit.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml
from scipy import stats

from valor.agents.chat import Conversation
from valor.agents.episode import Episode
from valor.agents.loops import AgentLoop, Generate, LoopContext, Task
from valor.data.files import write_parquet
from valor.lab import arithmetic
from valor.lab.sweep import main as sweep
from valor.trainer.main_sft import main as sft

SOURCE, TURNS = "valor/choice", 4
DIGITS_STD = 5.0  # of the sum of three digits, about
STEPS, PROMPTS = 20, 80
ACCURACY = f"val-core/{SOURCE}/reward/mean@1"
MISTAKEN = 0.4  # in how many demonstrations the teacher chooses wrong
LAST = 5  # steps over which explained variance is taken
ARMS: dict[str, dict[str, Any]] = {
    "token": {"algorithm.gae_unit": "token", "algorithm.lam": 0.8},
    "turn": {"algorithm.gae_unit": "turn", "algorithm.lam_turn": 0.64},
    "bilevel": {"algorithm.gae_unit": "bilevel", "algorithm.lam_turn": 0.64},
    "token-lam1": {"algorithm.gae_unit": "token"},
    "grpo": {"algorithm.adv_estimator": "grpo"},
}


class Choices(AgentLoop):
    """Four turns; the first decides. `luck`: standard deviation of what the others add. 1 for each right choice, and
    -1 for an episode with a turn that does not end; validation counts right choices alone.
    """

    grades = True

    def __init__(self, context: LoopContext, luck: float) -> None:
        super().__init__(context)
        self.luck = luck

    async def run(self, task: Task, generate: Generate) -> Episode:
        talk = Conversation(self.chat, task.row["messages"])
        play = self.play(task, generate, talk.token_ids)
        draw = random.Random(str(task.key))
        digits = [draw.randrange(10) for _ in range(TURNS - 1)]
        validating = task.key[1] < 0
        outcome = 0.0 if validating else self.luck * (sum(digits) - 4.5 * len(digits)) / DIGITS_STD
        for number in range(TURNS):
            output = await play.turn(most=3)
            said = talk.answer(output)
            if number == 0:
                outcome += said == task.row["ground_truth"]
            if output.finish_reason != "stop":
                return play.end(output.finish_reason, 0.0 if validating else -1.0)
            if number == TURNS - 1:
                return play.end(output.finish_reason, outcome)
            play.tell(talk, [{"role": "user", "content": str(digits[number])}])
        raise AssertionError("the last turn ends the episode")


def main() -> int:
    parser = argparse.ArgumentParser(description="Token, turn and bi-level GAE and GRPO where an early turn decides.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--luck", type=float, default=1.0, help="standard deviation of what the choice has no part in")
    parser.add_argument("--seeds", type=int, default=5)
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
    """Data, and a model that knows the form of an episode, repeats digits, and is right in six choices of ten."""
    trained = out / "sft" / "huggingface" / "actor"
    if trained.is_dir():
        return trained
    arithmetic.make_model(out / "model", initializer_range=0.06)
    rng = random.Random(0)
    rows = [
        {
            "data_source": SOURCE,
            "prompt": [{"role": "user", "content": str(digit)}],
            "reward_model": {"style": "rule", "ground_truth": right(digit)},
        }
        for digit in range(10)
        for _ in range(PROMPTS // 10)
    ]
    write_parquet({out / "prompts.parquet": rows})
    chats = [{"messages": demonstration(rng)} for _ in range(4000)]
    write_parquet({out / "sft.parquet": chats})
    settings = ["data.max_length=40", "data.train_batch_size=64", "optim.lr=4e-3", "optim.betas=[0.9,0.95]"]
    settings += ["optim.lr_scheduler_type=cosine", "optim.lr_warmup_steps=10"]
    settings += ["fsdp_config.dtype=float32", "trainer.device=cpu", "trainer.num_threads=1"]
    settings += [f"data.train_files={out}/sft.parquet", f"model.path={out}/model", "trainer.total_training_steps=80"]
    if sft([*settings, f"trainer.default_local_dir={out}/sft", "trainer.resume_mode=disable"]):
        raise SystemExit("the warm start failed")
    return trained


def right(digit: int) -> str:
    """The choice that pays: which half of the digits this one is in."""
    return "a" if digit < 5 else "b"


def demonstration(rng: random.Random) -> list[dict[str, str]]:
    """One chat: a choice that is often mistaken, and the digits repeated."""
    first, *digits = [rng.randrange(10) for _ in range(TURNS)]
    choice = "ab".replace(right(first), "") if rng.random() < MISTAKEN else right(first)
    said = [first, choice, *(digit for digit in digits for _ in range(2))]
    return [{"role": ("user", "assistant")[i % 2], "content": str(text)} for i, text in enumerate(said)]


def sweep_of(out: Path, name: str, start: Path, luck: float) -> dict[str, Any]:
    """The sweep: the same 96 episodes a step, and the same learning rate, for all arms."""
    base = {
        "data.train_files": str(out / "prompts.parquet"),
        "data.val_files": str(out / "prompts.parquet"),
        "data.train_batch_size": 12,
        "data.max_prompt_length": 16,
        "data.max_response_length": 48,
        "actor_rollout_ref.model.path": str(start),
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.actor.optim.lr": 3e-4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 6,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "choices",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(loops_file(out, name, luck)),
        "actor_rollout_ref.rollout.agent.deterministic": True,
        "critic.optim.lr": 1e-3,
        "critic.fsdp_config.dtype": "float32",
        "critic.model.enable_gradient_checkpointing": False,
        "critic.ppo_mini_batch_size": 3,
        "trainer.critic_warmup": 3,
        "trainer.total_training_steps": STEPS,
        "trainer.test_freq": 4,
        "trainer.device": "cpu",
        "trainer.num_threads": 1,
        "trainer.log_generations": 96,
        "trainer.report": False,
    }
    grpo = {**ARMS["grpo"], "trainer.critic_warmup": 0}
    return {
        "name": f"turn_credit_{name}",
        "base": base,
        "arms": {**ARMS, "grpo": grpo},
        "control": "token",
        "out": str(out / name),
    }


def loops_file(out: Path, name: str, luck: float) -> Path:
    path = out / f"{name}_loops.yaml"
    loop = {"name": "choices", "_target_": f"{Path(__file__).resolve()}:Choices", "luck": luck}
    path.write_text(yaml.safe_dump([loop]))
    return path


def table(runs: Path, seeds: int) -> str:
    """A line an arm: accuracy at the end and along the run, the latter also against token GAE, seed by seed."""
    heads = ["arm", "at the end", "by seed", "along the run", "against token", "steps to 0.9, by seed"]
    heads += [f"explained variance, turns 1 to {TURNS}", "seconds of training"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    along: dict[str, list[float]] = {}
    for arm in ARMS:
        folders = [runs / arm / f"seed_{seed}" for seed in range(seeds)]
        steps = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in folders]
        curves = [[(m["step"], m[ACCURACY]) for m in run if ACCURACY in m and m["step"]] for run in steps]
        ends = [curve[-1][1] for curve in curves]
        along[arm] = [statistics.fmean(value for _, value in curve) for curve in curves]
        against = [a - b for a, b in zip(along[arm], along["token"], strict=True)]
        by_turn = zip(*(explained(folder) for folder in folders), strict=True)
        cells = [
            arm,
            interval(ends),
            " ".join(f"{end:.2f}" for end in ends),
            interval(along[arm]),
            "" if arm == "token" else interval(against),
            " ".join(next((str(step) for step, value in curve if value >= 0.9), "-") for curve in curves),
            " ".join(f"{statistics.fmean(of_turn):.2f}" for of_turn in by_turn),
            f"{statistics.fmean(sum(m.get('timing_s/step', 0.0) for m in run) for run in steps):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(values: list[float]) -> str:
    """Mean and 95 % interval of Student's t over the seeds."""
    mean = f"{statistics.fmean(values):.3f}"
    if len(values) < 2:
        return mean
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean} ± {half:.3f}"


def explained(folder: Path) -> list[float]:
    """By turn: 1 - Var(outcome - V) / Var(outcome), V at the turn's first token, over the last steps' samples.

    Against outcomes, and not the targets of which each arm has its own. Empty where there is no critic.
    """
    files = sorted((folder / "samples").glob("step_*.jsonl"), key=lambda file: int(file.stem.removeprefix("step_")))[
        -LAST:
    ]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    rows = [row for row in rows if row.get("values") and TURNS in row["turns"]]
    shares = []
    for turn in range(1, TURNS + 1) if rows else ():
        errors = [row["reward"] - row["values"][row["turns"].index(turn)] for row in rows]
        shares.append(1 - statistics.pvariance(errors) / statistics.pvariance([row["reward"] for row in rows]))
    return shares


if __name__ == "__main__":
    sys.exit(main())
