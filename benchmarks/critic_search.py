#!/usr/bin/env python3
"""`valor critic search` on a real 135M instruct model: PPO with a critic on two-digit sums, then search with both.

    python benchmarks/critic_search.py --model SMOLLM2_DIR --out DIR [--steps 60] [--samples 1,4,16,64] [key=value ...]

The questions are sums and differences of two numbers below 100; 200 of them are held out. The policy stays imperfect
after so few steps, which leaves the critic something to choose. Further `key=value` go to the training run. What
comes out is DIR/search/search.md. Run it on a quiet machine: it takes hours on a CPU.
"""

import argparse
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from valor.cli import main as valor

HELD_OUT = 200


def write_questions(folder: Path) -> tuple[Path, Path]:
    """2,000 questions, the last 200 for the search."""
    rng, rows = random.Random(0), {}
    while len(rows) < 2000:
        a, b, sign = rng.randrange(100), rng.randrange(100), rng.choice("+-")
        text = f"What is {a} {sign} {b}? Answer with the number only."
        rows[text] = {
            "data_source": "valor/arithmetic",
            "prompt": [{"role": "user", "content": text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b if sign == "+" else a - b)},
            "extra_info": {"index": len(rows)},
        }
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "train.parquet", folder / "val.parquet"
    for path, part in zip(files, (list(rows.values())[:-HELD_OUT], list(rows.values())[-HELD_OUT:]), strict=True):
        pq.write_table(pa.Table.from_pylist(part), path)
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--samples", default="1,4,16,64")
    args, overrides = parser.parse_known_args()
    train, val = write_questions(args.out / "data")
    common = ["data.max_prompt_length=64", "data.max_response_length=16", "trainer.device=cpu"]
    run = args.out / "run"
    code = valor(
        [
            *("ppo", f"data.train_files={train}", f"actor_rollout_ref.model.path={args.model}", *common),
            *("data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16"),
            *("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.optim.lr=1e-5", "critic.optim.lr=1e-4"),
            *("actor_rollout_ref.actor.fsdp_config.dtype=float32", "trainer.critic_warmup=10"),
            *(f"trainer.total_training_steps={args.steps}", f"trainer.default_local_dir={run}", *overrides),
        ]
    )
    return code or valor(
        [
            *("critic", "search", f"data.val_files={val}", f"search.samples=[{args.samples}]", *common),
            *(f"actor_rollout_ref.model.path={run}/huggingface/actor", "actor_rollout_ref.rollout.dtype=float32"),
            *(f"critic.model.path={run}/huggingface/critic", "search.block=4", "search.tree_block=1"),
            f"search.out={args.out}/search",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
