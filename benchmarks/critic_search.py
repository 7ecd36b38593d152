#!/usr/bin/env python3
"""`valor critic search` on a real 135M instruct model: PPO with a critic on small sums, then search with both.

    python benchmarks/critic_search.py --model SMOLLM2_DIR --out DIR --steps 16 --held-out 40 [key=value ...]

The questions are sums and differences of two digits (`--below 20`: of two such numbers); some are held out. The policy
stays imperfect after so few steps, which leaves the critic something to choose. Models are computed in bfloat16,
`--dtype float32` where a processor is slow at that. Further `key=value` go to the training run. What comes out is
DIR/search/search.md.
"""

import argparse
import random
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from valor.cli import main as valor


def write_questions(folder: Path, below: int, held_out: int) -> tuple[Path, Path]:
    """All questions, the last of them for the search."""
    rows = [
        {
            "data_source": "valor/arithmetic",
            "prompt": [{"role": "user", "content": f"What is {a} {sign} {b}? Answer with the number only."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b if sign == "+" else a - b)},
            "extra_info": {"index": 0},
        }
        for sign, a, b in product("+-", range(below), range(below))
    ]
    random.Random(0).shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "train.parquet", folder / "val.parquet"
    for path, part in zip(files, (rows[:-held_out], rows[-held_out:]), strict=True):
        pq.write_table(pa.Table.from_pylist(part), path)
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=32, help="of a step, two samples each")
    parser.add_argument("--below", type=int, default=10)
    parser.add_argument("--held-out", type=int, default=40)
    parser.add_argument("--samples", default="1,4,16,64")
    parser.add_argument("--dtype", default="bfloat16")
    args, overrides = parser.parse_known_args()
    train, val = write_questions(args.out / "data", args.below, args.held_out)
    common = ["data.max_prompt_length=64", "data.max_response_length=12", "trainer.device=cpu"]
    run = args.out / "run"
    code = valor(
        [
            *("ppo", f"data.train_files={train}", f"actor_rollout_ref.model.path={args.model}", *common),
            *(f"data.train_batch_size={args.prompts}", f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}"),
            *("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.optim.lr=2e-5", "critic.optim.lr=5e-5"),
            *(f"actor_rollout_ref.actor.fsdp_config.dtype={args.dtype}", "trainer.critic_warmup=2"),
            *("actor_rollout_ref.model.enable_gradient_checkpointing=false", "data.val_files=null"),
            *("critic.model.enable_gradient_checkpointing=false", "trainer.report=false"),
            *(f"trainer.total_training_steps={args.steps}", f"trainer.default_local_dir={run}", *overrides),
        ]
    )
    return code or valor(
        [
            *("critic", "search", f"data.val_files={val}", f"search.samples=[{args.samples}]", *common),
            *(
                f"actor_rollout_ref.model.path={run}/huggingface/actor",
                f"actor_rollout_ref.actor.fsdp_config.dtype={args.dtype}",
            ),
            *(f"critic.model.path={run}/huggingface/critic"),
            f"search.out={args.out}/search",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
