#!/usr/bin/env python3
"""PPO with a critic on a real 135M instruct model, on a CPU: one-digit arithmetic from about 0.2 to over 0.8.

    python benchmarks/smollm2_arithmetic.py --model SMOLLM2_DIR --out RUN_DIR [--steps 100] [key=value ...]

Actor and critic both start from SmolLM2-135M-Instruct (any Hugging Face directory of it). The questions are all sums
and differences of two digits; a fifth of them is held out for validation. Accuracy is mean@1 of samples
drawn at temperature 1. Further `key=value` go to the run. Prints a JSON line with accuracies, steps and hours.
"""

import argparse
import json
import random
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from valor.trainer.main_ppo import main as train

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b}


def write_questions(folder: Path) -> tuple[Path, Path]:
    """All 200 questions, shuffled; the first 40 are for validation."""
    rows = [
        {
            "data_source": "valor/arithmetic",
            "prompt": [{"role": "user", "content": f"What is {a} {sign} {b}? Answer with the number only."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(value(a, b))},
            "extra_info": {"index": 0},
        }
        for sign, value in OPERATIONS.items()
        for a in range(10)
        for b in range(10)
    ]
    random.Random(0).shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    train_file, val_file = folder / "train.parquet", folder / "val.parquet"
    pq.write_table(pa.Table.from_pylist(rows[40:]), train_file)
    pq.write_table(pa.Table.from_pylist(rows[:40]), val_file)
    return train_file, val_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    args, overrides = parser.parse_known_args()
    train_file, val_file = write_questions(args.out / "data")
    run_dir = args.out / "run"
    start = time.time()
    code = train(
        [
            "algorithm.adv_estimator=gae",
            f"data.train_files={train_file}",
            f"data.val_files={val_file}",
            "data.train_batch_size=32",
            "data.max_prompt_length=64",
            "data.max_response_length=12",
            f"actor_rollout_ref.model.path={args.model}",
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            "actor_rollout_ref.actor.ppo_mini_batch_size=32",
            "actor_rollout_ref.actor.optim.lr=2e-5",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
            "actor_rollout_ref.rollout.val_kwargs.n=4",
            "critic.optim.lr=5e-5",
            "critic.ppo_max_token_len_per_gpu=4096",
            "critic.model.enable_gradient_checkpointing=false",
            "algorithm.lam=1.0",
            "trainer.critic_warmup=2",
            "trainer.device=cpu",
            "trainer.test_freq=20",
            f"trainer.total_training_steps={args.steps}",
            f"trainer.default_local_dir={run_dir}",
            "trainer.experiment_name=smollm2_one_digit_arithmetic",
            *overrides,
        ]
    )
    assert code == 0, code
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    key = "val-core/valor/arithmetic/reward/mean@4"
    curve = {row["step"]: round(row[key], 3) for row in rows if key in row}
    print(
        json.dumps({"validation_accuracy": curve, "steps": args.steps, "hours": round((time.time() - start) / 3600, 2)})
    )


if __name__ == "__main__":
    main()
