#!/usr/bin/env python3
"""Seconds a step and peak memory on this machine: four responses of 256 tokens with a model of Qwen3-0.6B's shape.

    python benchmarks/laptop.py [--write benchmarks/results/laptop.md]

GRPO (one prompt, four samples) and PPO with a critic of the same size (four prompts, one sample each), of all weights
and of LoRA adapters of rank 16, in bfloat16. Weights are random, responses always full; one update a step, no KL term.
Each line is a process of its own; the first step is left out. Run it with nothing else on the machine.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from page import write_block

QWEN3 = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
QWEN3 |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
TINY = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LORA = 16
CASES = [("GRPO", "LoRA"), ("GRPO", "all weights"), ("PPO", "LoRA"), ("PPO", "all weights")]


def make_inputs(folder: Path, sizes: dict[str, int]) -> None:
    """`model`, with a tokenizer of single characters, and `rows.jsonl`."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from valor.lab.arithmetic import make_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(**sizes, tie_word_embeddings=True, max_position_embeddings=4096)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    rows = [{"prompt": f"{a}+{b}+{a}+{b}=", "answer": str(2 * (a + b))} for a in range(10, 26) for b in (13, 27)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings(algorithm: str, what: str, tokens: int) -> list[str]:
    """The command of a case but for its steps."""
    prompts, n = (1, 4) if algorithm == "GRPO" else (4, 1)
    rank = LORA if what == "LoRA" else 0
    roles = ["actor_rollout_ref.actor", *(["critic"] if algorithm == "PPO" else [])]
    models = ["actor_rollout_ref.model", *(["critic.model"] if algorithm == "PPO" else [])]
    return [
        f"algorithm={algorithm.lower()}",
        "actor_rollout_ref.model.path=model",
        "data.train_files=rows.jsonl",
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.rollout.n={n}",
        "data.max_prompt_length=64",
        f"data.max_response_length={tokens}",
        "actor_rollout_ref.rollout.ignore_eos=true",
        f"custom_reward_function.path={Path(__file__).with_name('length_reward.py')}",
        *(f"{role}.fsdp_config.dtype=bfloat16" for role in roles),
        *(f"{model}.enable_gradient_checkpointing=false" for model in models),
        *(f"{model}.lora_rank={rank}" for model in models if rank),
        "trainer.device=cpu",
        "trainer.report=false",
        "trainer.logger=[file]",
        "trainer.save_freq=-1",
        "trainer.default_local_dir=run",
    ]


def measure(folder: Path, algorithm: str, what: str, tokens: int, steps: int) -> str:
    """Cells: median seconds of the steps after the first, steps a second, and the peak of resident memory in GB."""
    command = [sys.executable, "-m", "valor", "ppo", *settings(algorithm, what, tokens)]
    command += [f"trainer.total_training_steps={steps}", "trainer.resume_mode=disable"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode == -signal.SIGKILL:
        return f" | | does not fit into {psutil.virtual_memory().total / 1e9:.0f}"
    if process.returncode:
        sys.exit(f"{algorithm}, {what}: exit code {process.returncode}\n{(folder / 'log').read_text()[-3000:]}")
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    seconds = statistics.median(row["timing_s/step"] for row in rows if row["step"] > 1)
    return f"{seconds:.2f} | {1 / seconds:.3f} | {usage.ru_maxrss * 1024 / 1e9:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="of each response")
    parser.add_argument("--tiny", action="store_true", help="a model of two narrow layers, to see that all of it runs")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced by this one")
    args = parser.parse_args()
    lines = ["| | trained | s a step | steps a second | peak GB |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as name:
        make_inputs(Path(name), TINY if args.tiny else QWEN3)
        for algorithm, what in CASES:
            lines.append(f"| {algorithm} | {what} | {measure(Path(name), algorithm, what, args.tokens, args.steps)} |")
            print(lines[-1], flush=True)
    if args.write:
        write_block(args.write, "laptop", "\n".join(lines))


if __name__ == "__main__":
    main()
