"""A hybrid and a mixture of experts on the demo's task, by PPO and by GRPO: do they learn it?

    python benchmarks/families_learn.py --out runs/families [--seed 0] [--write benchmarks/results/families_learn.md]

Each is a random model of about the demo's size, made from the family's own config: Qwen3.5 with two layers of linear
attention and one of full attention, Qwen3-MoE with four experts of which two answer. Data, warm start and both runs are
those of `valor demo`, on one thread; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from valor.lab import arithmetic
from valor.lab.demo import ppo_overrides, read_results, sft_overrides
from valor.trainer.main_ppo import main as ppo
from valor.trainer.main_sft import main as sft

SIZES = {
    **{"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "tie_word_embeddings": True},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        **{
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "norm_topk_prob": True},
}


def make_model(kind: str, folder: Path, seed: int) -> int:
    """A random model of the family with the demo's tokenizer; its number of weights."""
    tokenizer = arithmetic.make_tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **SIZES, **special, **FAMILIES[kind])
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def learn(kind: str, out: Path, seed: int) -> list[dict[str, Any]]:
    """A row of the table for each algorithm."""
    weights = make_model(kind, out / "model", seed)
    files = arithmetic.make_data(out / "data", seed)
    start = out / "sft" / "huggingface" / "actor"
    if not start.exists() and sft(sft_overrides(out / "model", files, out / "sft", seed)):
        raise SystemExit(f"{kind}: the warm start failed")
    rows = []
    for algorithm in ("ppo", "grpo"):
        run_dir = out / algorithm
        if not (run_dir / "huggingface").exists() and ppo(ppo_overrides(start, files, run_dir, algorithm, seed)):
            raise SystemExit(f"{kind}: {algorithm} failed")
        before, after = read_results(run_dir)
        last = json.loads((run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        rows.append(
            {
                "family": kind,
                "weights": f"{weights:,}",
                "algorithm": algorithm,
                "before": f"{before.validation:.3f}",
                "after": f"{after.validation:.3f}",
                "rollout against training, mean Δ of a probability": f"{last['training/rollout_probs_diff_mean']:.1e}",
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0]), *(" | ".join(row.values()) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/families"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    rows = [row for kind in FAMILIES for row in learn(kind, arguments.out / kind, arguments.seed)]
    print(table(rows))
    if arguments.write:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        head = f"# A hybrid and a mixture of experts on the demo's task\n\n`python {Path(__file__).parent.name}/"
        about = (
            f"{Path(__file__).name} --seed {arguments.seed}`, commit {commit}: greedy accuracy on 256 unseen sums.\n"
        )
        arguments.write.write_text(f"{head}{about}\n{table(rows)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
