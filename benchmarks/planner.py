"""The planner's peaks of memory against those of real steps, on this machine.

    python benchmarks/planner.py MODEL [--only NAME …] [--out benchmarks/results/planner.md]

Each configuration is a run of two steps in processes of its own; the second step, whose optimizers have their state, is
compared. Every prompt and response is as long as it may be.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import torch

from valor.config import PPOConfig, load
from valor.trainer.memory_plan import GIB, Machine, estimate

PROMPT, RESPONSE, PROMPTS, SAMPLES = 64, 64, 4, 2
COMMON = [
    f"data.train_batch_size={PROMPTS}",
    f"data.max_prompt_length={PROMPT}",
    f"data.max_response_length={RESPONSE}",
    "data.truncation=left",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    "actor_rollout_ref.rollout.ignore_eos=true",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    f"critic.ppo_mini_batch_size={PROMPTS}",
    "reward.num_workers=1",
    "trainer.device=cpu",
    "trainer.num_threads=1",
    "trainer.report=false",
    "trainer.total_training_steps=2",
]
FLOAT32 = [f"{role}.fsdp_config.dtype=float32" for role in ("actor_rollout_ref.actor", "critic")]
NOT_CHECKPOINTED = [f"{role}.model.enable_gradient_checkpointing=false" for role in ("actor_rollout_ref", "critic")]
CASES = {
    "FSDP, 1 process, packed": FLOAT32,
    "FSDP, 2 processes, bfloat16": ["trainer.n_gpus_per_node=2"],
    "LoRA of rank 16": [*FLOAT32, "actor_rollout_ref.model.lora_rank=16", "critic.model.lora_rank=16"],
    "ensemble of 2 critics": [*FLOAT32, "critic.ensemble_size=2", "critic.model.value_head_init=normal"],
    "padded, all activations kept": [
        *FLOAT32, *NOT_CHECKPOINTED, "actor_rollout_ref.model.use_remove_padding=false",
        "critic.model.use_remove_padding=false",
    ],
}  # fmt: skip


def measured(overrides: list[str], folder: Path) -> dict[str, float]:
    """GiB of the fullest process in the second step, by kind of call."""
    words = " ".join(f"{number} and" for number in range(PROMPT))
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{words} {i}"}],
            "data_source": "valor/arithmetic",
            "reward_model": {"ground_truth": "1"},
        }
        for i in range(PROMPTS)
    ]
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [*overrides, f"data.train_files={file}", f"trainer.default_local_dir={folder / 'run'}"]
    subprocess.run([sys.executable, "-m", "valor", "ppo", *given], check=True, stdout=sys.stderr)
    last = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    return {key.rpartition("/")[2]: value for key, value in last.items() if key.startswith("perf/peak_rss_gb/")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)  # as each process of the runs
    lines = [
        "# Planner: memory foreseen and used",
        "",
        f"`python benchmarks/planner.py` on a CPU: {PROMPTS} prompts x {SAMPLES} samples, {PROMPT} + {RESPONSE} tokens,"
        f" model `{Path(args.model).name}`. GiB of resident memory of the fullest process at its peak"
        " in the second step.",
        "",
        "| configuration | call | GiB used | foreseen | difference |",
        "|---|---|---|---|---|",
    ]
    for name, own in CASES.items():
        if args.only and name not in args.only:
            continue
        overrides = [f"actor_rollout_ref.model.path={args.model}", *COMMON, *own]
        config = load(overrides, PPOConfig).config
        with tempfile.TemporaryDirectory() as folder:
            used = measured(overrides, Path(folder))
        machine = Machine("cpu", config.trainer.n_gpus_per_node or 1, float(psutil.virtual_memory().total))
        expected = estimate(config, machine)
        peak, planned = max(used.values()), max(map(expected.peak, expected.phases)) / GIB
        call = max(used, key=lambda name: used[name])
        lines.append(f"| {name} | {call} | {peak:.2f} | {planned:.2f} | {planned / peak - 1:+.0%} |")
        print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
