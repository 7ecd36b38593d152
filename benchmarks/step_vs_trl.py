#!/usr/bin/env python3
"""Seconds a GRPO step: Valor against TRL's GRPOTrainer, in turn, on the same model, prompts, lengths, threads, dtype.

    python benchmarks/step_vs_trl.py --model DIR --data train.parquet --trl-python TRL_VENV/bin/python \\
        --prompts 8 --n 4 --max-new 128 --dtype bfloat16 --rounds 2

`--data` is a parquet file in Valor's columns (examples/data_preprocess makes one); `--trl-python` an interpreter of an
environment of its own: pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0 datasets. Without it only Valor is
timed. Both sides take one update a batch, no KL term, a reward that costs nothing, no gradient checkpointing, AdamW.
Each round runs TRL and then Valor as a process of its own; the first step of each is left out (warm-up). Prints a JSON
line for every process and at the end the ratio of the medians, TRL / Valor: above 1, Valor is faster.

`--compare off:shared off:attention off:decoder off:whole compile ppo` runs Valor in these forms as well, in
every round: without a group's prompt computed once, without attention by products, without the decoder over the
weights, with that decoder's steps by parts for small models too, with model.compile, and as PPO with a critic of the
same size.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FORMS = ["off:shared", "off:attention", "off:decoder", "off:whole", "compile", "ppo"]


def switch(form: str, args: argparse.Namespace) -> list[str]:
    """Settings of a form of Valor; what has no key is switched off in this process."""
    if form == "off:attention":
        from valor.models import attention

        attention._SHORT = 0
    if form == "off:decoder":
        from valor.rollout.native import engine

        engine.agrees = lambda *_: False
    if form == "off:whole":
        from valor.rollout.native import decoder

        decoder._MOST_WHOLE = 0
    key = "actor_rollout_ref.model"
    critic = {
        "critic.model.path": args.model,
        "critic.model.enable_gradient_checkpointing": "false",
        "critic.fsdp_config.dtype": args.dtype,
        "critic.ppo_mini_batch_size": args.prompts,
        "critic.ppo_max_token_len_per_gpu": args.micro_tokens,
        "algorithm.adv_estimator": "gae",
    }
    settings = {
        "off:shared": {f"{key}.share_prefixes": "false"},
        "compile": {f"{key}.compile": "true"},
        "ppo": critic,
    }
    return [f"{name}={value}" for name, value in settings.get(form, {}).items()]


def run_valor(args: argparse.Namespace) -> dict:
    from valor.trainer.main_ppo import main

    settings = switch(args.form, args)
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
                *settings,
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
    print(json.dumps({"system": side, "form": argv[-1], **result}), flush=True)
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
    parser.add_argument("--compare", nargs="*", choices=FORMS, default=[], help="forms of Valor to time as well")
    parser.add_argument("--side", choices=["valor", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--form", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(run_valor(args) if args.side == "valor" else run_trl(args)))
        return
    argv = sys.argv[1:]
    sides = [("trl", args.trl_python, ""), *(("valor", sys.executable, form) for form in ("", *args.compare))]
    results: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for side, python, form in sides:
            if python:
                found = run_side(side, python, [*argv, "--form", form])
                results.setdefault(f"{side} {form}".strip(), []).append(found["step_seconds"])
    medians = {name: statistics.median(found) for name, found in results.items()}
    ratios = {name: round(medians["trl"] / median, 2) for name, median in medians.items() if "trl" in medians}
    print(json.dumps({"median": medians, "trl_over": ratios, "dtype": args.dtype, "model": args.model}))


if __name__ == "__main__":
    main()
