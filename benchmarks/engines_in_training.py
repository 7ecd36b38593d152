#!/usr/bin/env python3
"""The same training run with the native engine, with vLLM in the process, and with vLLM under Ray.

    python benchmarks/engines_in_training.py demo --out DIR
    python benchmarks/engines_in_training.py gsm8k --out DIR --model SMOLLM2_DIR --questions FILE [key=value ...]

`demo` makes the model and data of `valor demo`, warms the model up, and trains it by PPO with a critic. `gsm8k` trains
a real model by GRPO on short GSM8K questions, in float32, after one example of an answer: half the reward is for a
response that is a number after `####` and nothing else, half for the right one, so that a model too small for the
second can learn the first. FILE is jsonl (or .jsonl.gz) with `question` and `answer`. --only picks systems. Further
`key=value` go to every run.

Prints a table: mean reward of the first and last steps, the largest difference between the log-probability that the
engine gave to a sampled token and the trainer's (over all steps, so after every update), and seconds a step.
"""

import argparse
import gzip
import json
import statistics
from pathlib import Path

from valor.lab import arithmetic
from valor.lab.demo import ppo_overrides, sft_overrides
from valor.trainer.main_ppo import main as ppo
from valor.trainer.main_sft import main as sft

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.gpu_memory_utilization=0.1", f"{ROLLOUT}.max_num_seqs=64"]
SYSTEMS = {
    "native": [],
    "vllm": VLLM,
    "vllm under Ray": [*VLLM, "trainer.controller=ray"],
    "native, LoRA": ["actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.actor.optim.lr=2e-4"],
    "vllm, LoRA": [*VLLM, "actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.actor.optim.lr=2e-4"],
}
ENDS = 2  # steps at the beginning and at the end that are averaged
LONGEST_QUESTION = 160  # characters
EXAMPLE = [
    {"role": "user", "content": "Tom has 3 apples and buys 4 more. How many has he?"},
    {"role": "assistant", "content": "#### 7"},
]


def demo_settings(args: argparse.Namespace) -> list[str]:
    """The RL part of `valor demo`."""
    model = arithmetic.make_model(args.out / "model", seed=0)
    files = arithmetic.make_data(args.out / "data", seed=0)
    if not (args.out / "sft" / "huggingface" / "actor").is_dir():
        assert sft(sft_overrides(model, files, args.out / "sft", 0)) == 0
    return ppo_overrides(args.out / "sft" / "huggingface" / "actor", files, args.out)


def gsm8k_settings(args: argparse.Namespace) -> list[str]:
    open_file = gzip.open if args.questions.suffix == ".gz" else open
    with open_file(args.questions, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "train.jsonl").open("w", encoding="utf-8") as file:
        for row in rows:
            if len(row["question"]) > LONGEST_QUESTION:
                continue
            truth = row["answer"].rpartition("####")[2].strip().replace(",", "")
            example = {
                "data_source": "openai/gsm8k",
                "prompt": [*EXAMPLE, {"role": "user", "content": row["question"]}],
                "reward_model": {"style": "rule", "ground_truth": truth},
            }
            file.write(json.dumps(example) + "\n")
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={args.out / 'train.jsonl'}",
        "data.val_files=null",
        "data.train_batch_size=8",
        "data.max_prompt_length=128",
        "data.filter_overlong_prompts=true",
        "data.max_response_length=16",
        f"actor_rollout_ref.model.path={args.model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        f"{ROLLOUT}.dtype=float32",
        f"{ROLLOUT}.n=4",
        f"reward.custom_reward_function.path={Path(__file__).with_name('gsm8k_format_reward.py')}",
        "trainer.device=cpu",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={args.steps}",
    ]


def summary(run_dir: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "critic/score/mean" in line]
    rewards = [step["critic/score/mean"] for step in steps]
    later = steps[1:]  # the first step pays for the start
    return {
        "first": statistics.mean(rewards[:ENDS]),
        "last": statistics.mean(rewards[-ENDS:]),
        "difference": max(step["training/rollout_log_probs_diff_max"] for step in steps),
        "generation": statistics.median(step["timing_s/gen"] for step in later),
        "weights": statistics.median(step.get("timing_s/update_weights", 0.0) for step in later),
        "step": statistics.median(step["timing_s/step"] for step in later),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["demo", "gsm8k"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--steps", type=int, default=8, help="of gsm8k")
    parser.add_argument("--only", choices=list(SYSTEMS), nargs="+", default=list(SYSTEMS))
    args, overrides = parser.parse_known_args()
    if args.task == "gsm8k" and (args.model is None or args.questions is None):
        parser.error("gsm8k needs --model and --questions")
    settings = demo_settings(args) if args.task == "demo" else gsm8k_settings(args)
    heads = [f"reward, first {ENDS} steps", f"last {ENDS}", "max log-prob difference", "generation", "weights", "step"]
    print(f"| engine | {' | '.join(heads)} |\n|---{'|---:' * len(heads)}|", flush=True)
    for name in args.only:
        run_dir = args.out / name.replace(",", "").replace(" ", "_")
        code = ppo([*settings, *SYSTEMS[name], f"trainer.default_local_dir={run_dir}", *overrides])
        assert code == 0, f"{name}: exit code {code}"
        found = summary(run_dir)
        cells = [f"{found['first']:.3f}", f"{found['last']:.3f}", f"{found['difference']:.1e}"]
        cells += [f"{found[key]:.2f} s" for key in ("generation", "weights", "step")]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
