"""Where an early turn decides, which steps should GAE take? Tokens, turns, turns then tokens; and GRPO beside them.

    python benchmarks/turn_credit.py --out runs/turn_credit          # about 40 minutes on two cores
    python benchmarks/turn_credit.py --out runs/turn_credit --seeds 1 trainer.total_training_steps=4

An episode has five turns. In the first the policy sees two digits and says which is larger (`a` or `b`); that alone is
for it to decide. Then it is told four random digits, one a turn, which it repeats. The outcome is 1 for the right
choice, plus luck: the four digits, centred, with a standard deviation of about 1. So most of an outcome's variance
comes after the choice, and is there for a critic to see. The warm start knows the form and chooses at random.

Prints accuracy of the choice (validation without luck) by arm with intervals over seeds, how soon it is reached, and
the critic's explained variance by turn.
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

from valor.agents.chat import Conversation
from valor.agents.episode import Episode
from valor.agents.loops import AgentLoop, Generate, Task
from valor.data.files import write_parquet, write_rows
from valor.lab import arithmetic
from valor.lab.sweep import main as sweep
from valor.trainer.main_sft import main as sft

SOURCE, TURNS, LUCK = "valor/choice", 5, 5.7
STEPS = 60
ARMS: dict[str, dict[str, Any]] = {
    "token": {"algorithm.gae_unit": "token", "algorithm.lam": 0.95},
    "turn": {"algorithm.gae_unit": "turn", "algorithm.lam_turn": 0.95},
    "bilevel": {"algorithm.gae_unit": "bilevel", "algorithm.lam_turn": 0.95},
    "token-lam1": {"algorithm.gae_unit": "token"},
    "grpo": {"algorithm.adv_estimator": "grpo"},
}


class Choices(AgentLoop):
    """Five turns; the first decides."""

    grades = True

    async def run(self, task: Task, generate: Generate) -> Episode:
        talk = Conversation(self.chat, task.row["messages"])
        play = self.play(task, generate, talk.token_ids)
        draw = random.Random(str(task.key))
        digits = [draw.randrange(10) for _ in range(TURNS - 1)]
        validating = task.key[1] < 0
        outcome = 0.0 if validating else (sum(digits) - 4.5 * len(digits)) / LUCK
        for number in range(TURNS):
            output = await play.turn(most=3)
            said = talk.answer(output)
            if number == 0:
                outcome += said == task.row["ground_truth"]
            if number == TURNS - 1 or output.finish_reason != "stop":
                return play.end(output.finish_reason, outcome)
            play.observe(talk.tell([{"role": "user", "content": str(digits[number])}]).token_ids)
        raise AssertionError("the last turn ends the episode")


def main() -> int:
    parser = argparse.ArgumentParser(description="Token, turn and bi-level GAE and GRPO where an early turn decides.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of the runs")
    args = parser.parse_args()
    start = warm_start(args.out)
    file = args.out / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep_of(args.out, start, args.seeds, args.parallel)), encoding="utf-8")
    code = sweep([str(file), *args.overrides])
    print(table(args.out / "runs", args.seeds))
    return code


def warm_start(out: Path) -> Path:
    """Data, and a model that knows the form of an episode and chooses at random."""
    trained = out / "sft" / "huggingface" / "actor"
    if trained.is_dir():
        return trained
    arithmetic.make_model(out / "model")
    rng = random.Random(0)
    pairs = [(a, b) for a in range(10) for b in range(10) if a != b]
    rows = [
        {
            "data_source": SOURCE,
            "prompt": [{"role": "user", "content": f"{a}{b}"}],
            "reward_model": {"style": "rule", "ground_truth": "a" if a > b else "b"},
        }
        for a, b in pairs
    ]
    write_rows(out / "prompts.parquet", rows)
    chats = [{"messages": demonstration(rng, *rng.choice(pairs))} for _ in range(4000)]
    write_parquet({out / "sft.parquet": chats})
    settings = ["data.max_length=40", "data.train_batch_size=64", "optim.lr=4e-3", "optim.betas=[0.9,0.95]"]
    settings += ["fsdp_config.dtype=float32", "trainer.device=cpu", "trainer.num_threads=1"]
    settings += [f"data.train_files={out}/sft.parquet", f"model.path={out}/model", "trainer.total_training_steps=150"]
    if sft([*settings, f"trainer.default_local_dir={out}/sft", "trainer.resume_mode=disable"]):
        raise SystemExit("the warm start failed")
    return trained


def demonstration(rng: random.Random, a: int, b: int) -> list[dict[str, str]]:
    """One chat: a choice at random, and the digits repeated."""
    digits = [str(rng.randrange(10)) for _ in range(TURNS - 1)]
    said = [f"{a}{b}", rng.choice("ab"), *(digit for digit in digits for _ in range(2))]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]


def sweep_of(out: Path, start: Path, seeds: int, parallel: int) -> dict[str, Any]:
    """The sweep: the same 64 episodes a step, and the same learning rate, for all arms."""
    base = {
        "data.train_files": str(out / "prompts.parquet"),
        "data.val_files": str(out / "prompts.parquet"),
        "data.train_batch_size": 16,
        "data.max_prompt_length": 16,
        "data.max_response_length": 48,
        "actor_rollout_ref.model.path": str(start),
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.actor.optim.lr": 3e-4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "choices",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(loops_file(out)),
        "actor_rollout_ref.rollout.agent.deterministic": True,
        "critic.optim.lr": 1e-3,
        "critic.fsdp_config.dtype": "float32",
        "critic.model.enable_gradient_checkpointing": False,
        "critic.ppo_mini_batch_size": 4,
        "trainer.critic_warmup": 5,
        "trainer.total_training_steps": STEPS,
        "trainer.test_freq": 5,
        "trainer.device": "cpu",
        "trainer.num_threads": 1,
        "trainer.report": False,
    }
    grpo = {**ARMS["grpo"], "trainer.critic_warmup": 0}
    return {
        "name": "turn_credit",
        "base": base,
        "arms": {**ARMS, "grpo": grpo},
        "control": "token",
        "seeds": list(range(seeds)),
        "parallel": parallel,
        "out": str(out / "runs"),
    }


def loops_file(out: Path) -> Path:
    path = out / "loops.yaml"
    path.write_text(yaml.safe_dump([{"name": "choices", "_target_": f"{Path(__file__).resolve()}:Choices"}]))
    return path


def table(runs: Path, seeds: int) -> str:
    """Accuracy, steps until 0.9, and explained variance by turn over the last ten steps, a line an arm."""
    lines = ["| arm | accuracy at the end, by seed | mean | steps to 0.9, by seed | explained variance, turns 1 to 5 |"]
    lines.append("|---|---|---:|---|---|")
    for arm in ARMS:
        ends, soon, explained = [], [], []
        for seed in range(seeds):
            path = runs / arm / f"seed_{seed}" / "metrics.jsonl"
            metrics = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            curve = [
                (m["step"], m[key]) for m in metrics for key in m if key.startswith("val-core/") and "mean@1" in key
            ]
            if curve:
                ends.append(curve[-1][1])
                soon.append(next((str(step) for step, value in curve if value >= 0.9), "-"))
            explained += [
                [m.get(f"critic/vf_explained_var/turn_{k}") for k in range(1, TURNS + 1)] for m in metrics[-10:]
            ]
        of_turn = [[row[k] for row in explained if row[k] is not None] for k in range(TURNS)]
        shown = " ".join(f"{statistics.fmean(values):.2f}" if values else "-" for values in of_turn)
        mean = f"{statistics.fmean(ends):.3f}" if ends else "-"
        lines.append(f"| {arm} | {' '.join(f'{end:.2f}' for end in ends)} | {mean} | {' '.join(soon)} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
