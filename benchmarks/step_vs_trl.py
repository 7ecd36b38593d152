#!/usr/bin/env python3
"""Seconds a GRPO step: Valor against TRL's GRPOTrainer, in turn, on the same model, prompts, lengths, threads, dtype.

    python benchmarks/step_vs_trl.py --model DIR --data train.parquet --trl-python TRL_VENV/bin/python \\
        --prompts 8 --n 4 --max-new 128 --dtype bfloat16 --rounds 2

`--data` is a parquet file in Valor's columns (examples/data_preprocess makes one); `--trl-python` an interpreter of an
environment of its own: pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0 datasets. Without it only Valor is
timed. Both sides take one update a batch, no KL term, a reward that costs nothing, no gradient checkpointing, AdamW.
Each round runs TRL and then Valor as a process of its own; the first step of each is left out (warm-up). Prints a JSON
line for every process and at the end the ratio of the medians, TRL / Valor: above 1, Valor is faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def run_valor(args: argparse.Namespace) -> dict:
    from valor.trainer.main_ppo import main

    reward = Path(__file__).with_name("length_reward.py")
    with tempfile.TemporaryDirectory() as tmp:
        code = main(
            [
                "algorithm.adv_estimator=grpo",
                f"data.train_files={args.data}",
                "data.max_prompt_length=512",
                f"data.max_response_length={args.max_new}",
                f"data.train_batch_size={args.prompts}",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}",
                f"actor_rollout_ref.rollout.n={args.n}",
                f"actor_rollout_ref.model.path={args.model}",
                "actor_rollout_ref.model.enable_gradient_checkpointing=false",
                f"actor_rollout_ref.actor.fsdp_config.dtype={args.dtype}",
                f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={args.micro_tokens}",
                f"custom_reward_function.path={reward}",
                "trainer.device=cpu",
                "trainer.controller=local",
                f"trainer.num_threads={args.threads}",
                f"trainer.total_training_steps={args.steps}",
                "trainer.report=false",
                "trainer.logger=[file]",
                f"trainer.default_local_dir={tmp}",
            ]
        )
        assert code == 0
        rows = [json.loads(line) for line in (Path(tmp) / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if r["step"] > 1]
    phases = {k: statistics.median(r[k] for r in steps) for k in steps[0] if k.startswith("timing_s/")}
    return {
        "seconds": [r["timing_s/step"] for r in steps],
        "mean_length": statistics.mean(r["response_length/mean"] for r in steps),
        "phases": {k: round(v, 3) for k, v in phases.items()},
    }


def run_trl(args: argparse.Namespace) -> dict:
    import pandas
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    prompts = [list(p) for p in pandas.read_parquet(args.data)["prompt"]]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    samples = args.prompts * args.n
    with tempfile.TemporaryDirectory() as tmp:
        config = GRPOConfig(
            output_dir=tmp,
            per_device_train_batch_size=samples,
            num_generations=args.n,
            max_completion_length=args.max_new,
            max_steps=args.steps,
            use_cpu=True,
            bf16=args.dtype == "bfloat16",
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            learning_rate=1e-6,
            beta=0.0,
            gradient_checkpointing=False,
            temperature=1.0,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [float(len(c[0]["content"]) % 7) for c in completions],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
            processing_class=AutoTokenizer.from_pretrained(args.model),
        )
        trainer.train()
    logs = [h for h in trainer.state.log_history if "step_time" in h][1:]
    return {
        "seconds": [h["step_time"] for h in logs],
        "mean_length": statistics.mean(h["completions/mean_length"] for h in logs),
    }


def run_side(side: str, python: str, argv: list[str]) -> dict:
    """One process of one side; its last line is the result."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, __file__, "--side", side, *argv]
    out = subprocess.run(command, env=env, capture_output=True, text=True)
    if out.returncode:
        sys.exit(f"{side} failed:\n{out.stderr[-3000:]}")
    result = json.loads(out.stdout.splitlines()[-1])
    result["step_seconds"] = round(statistics.median(result.pop("seconds")), 3)
    print(json.dumps({"system": side, **result}), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--trl-python")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--max-new", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro-tokens", type=int, default=4096, help="Valor's token budget of a micro-batch")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--side", choices=["valor", "trl"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(run_valor(args) if args.side == "valor" else run_trl(args)))
        return
    argv = sys.argv[1:]
    results: dict[str, list[float]] = {"trl": [], "valor": []}
    for _ in range(args.rounds):
        for side, python in (("trl", args.trl_python), ("valor", sys.executable)):
            if python:
                results[side].append(run_side(side, python, argv)["step_seconds"])
    if results["trl"]:
        ratio = statistics.median(results["trl"]) / statistics.median(results["valor"])
        print(json.dumps({"trl_over_valor": round(ratio, 2), "dtype": args.dtype, "model": args.model}))


if __name__ == "__main__":
    main()
