#!/usr/bin/env python3
"""A reward model from preference pairs on a real small model, on a CPU, and PPO scored by it.

    python benchmarks/reward_model.py --pairs FILE --model DIR --out RUN_DIR [--steps 38] [--ppo-steps 3] [key=value]

FILE is jsonl with `prompt`, `chosen`, `rejected` and `source`; a fifth of the prompts of each source is held out. DIR
is any Hugging Face directory of a causal language model: the reward model starts from it, and so do actor and critic of
the PPO steps that follow, on the shorter prompts of FILE. Further `key=value` go to `valor rm train`. Prints what
`valor rm train` prints (accuracy by source, what length explains), and a JSON line of PPO's scores.
"""

import argparse
import json
import time
from pathlib import Path

from valor.trainer.main_ppo import main as ppo
from valor.trainer.main_sft import rm_train as train_reward_model

LONGEST_PROMPT = 200  # characters
NUM_PROMPTS = 64
ROLES = "actor_rollout_ref.actor", "critic", "reward.reward_model"


def train(args: argparse.Namespace, overrides: list[str]) -> None:
    """The reward model; what it prints is also in its metrics."""
    code = train_reward_model(
        [
            f"model.path={args.model}",
            "model.enable_gradient_checkpointing=false",
            f"data.train_files={args.pairs}",
            "data.val_share=0.2",
            "data.train_batch_size=8",
            "data.max_length=256",
            "data.max_token_len_per_gpu=2048",
            "optim.lr=2e-5",
            "fsdp_config.dtype=float32",
            "trainer.device=cpu",
            "trainer.total_epochs=10",
            f"trainer.total_training_steps={args.steps}",
            f"trainer.default_local_dir={args.out / 'rm'}",
            *overrides,
        ]
    )
    assert code == 0, code


def write_prompts(pairs: Path, path: Path) -> None:
    """Different short prompts of the pairs, of a source that no rule grades."""
    rows = map(json.loads, pairs.read_text(encoding="utf-8").splitlines())
    prompts = dict.fromkeys(row["prompt"] for row in rows if len(row["prompt"]) <= LONGEST_PROMPT)
    graded = {"data_source": "pairs", "reward_model": {"style": "model", "ground_truth": None}}
    chats = [{"prompt": [{"role": "user", "content": prompt}], **graded} for prompt in list(prompts)[:NUM_PROMPTS]]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def score_a_run(args: argparse.Namespace) -> dict[int, float]:
    """PPO with it: the mean score of each step."""
    write_prompts(args.pairs, args.out / "prompts.jsonl")
    code = ppo(
        [
            "reward_model.enable=True",
            f"reward_model.path={args.out / 'rm' / 'huggingface' / 'reward_model'}",
            f"data.train_files={args.out / 'prompts.jsonl'}",
            "data.val_files=null",
            "data.train_batch_size=8",
            "data.max_prompt_length=128",
            "data.filter_overlong_prompts=true",
            "data.max_response_length=24",
            f"actor_rollout_ref.model.path={args.model}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
            "critic.ppo_max_token_len_per_gpu=2048",
            *(f"{role}.fsdp_config.dtype=float32" for role in ROLES),
            "trainer.device=cpu",
            f"trainer.total_training_steps={args.ppo_steps}",
            f"trainer.default_local_dir={args.out / 'ppo'}",
        ]
    )
    assert code == 0, code
    rows = [json.loads(line) for line in (args.out / "ppo" / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: round(row["reward/pairs/rm_score"], 4) for row in rows if "reward/pairs/rm_score" in row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=38)
    parser.add_argument("--ppo-steps", type=int, default=3)
    args, overrides = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    train(args, overrides)
    trained = time.time()
    scores = score_a_run(args)
    minutes = {"training": round((trained - start) / 60, 1), "ppo": round((time.time() - trained) / 60, 1)}
    print(json.dumps({"rm_score": scores, "minutes": minutes}))


if __name__ == "__main__":
    main()
