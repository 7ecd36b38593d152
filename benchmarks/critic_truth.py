"""How far from the truth is each kind of critic, over training? Walks, whose values are known exactly.

    python benchmarks/critic_truth.py --out runs/critic_truth --seeds 1        # 9 runs of a minute
    python benchmarks/critic_truth.py --out runs/critic_truth --seeds 5 --page benchmarks/results/critic_truth.md

Each kind trains its own policy by PPO on walks of eight doors. Checkpoints of critic and policy are judged every ten
steps: explained variance, bias and rank correlation of V against V^π of that very policy, over all states, weighted by
how often it visits them (`walk_values.py`). No sampling is left in the numbers but that of the training itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import walks
from page import write_block

EVERY = 10
ENSEMBLE = {"critic.ensemble_size": 2, "critic.model.value_head_init": "normal"}
BINS = {"num_bins": 51, "value_min": -0.5, "value_max": 1.5}  # noisy outcomes leave [0, 1]
KINDS: dict[str, dict[str, Any]] = {
    "mse": {"critic.value_loss": "mse"},
    "mse, random head": {"critic.value_loss": "mse", "critic.model.value_head_init": "normal"},
    "huber": {"critic.value_loss": "huber", "critic.value_loss_kwargs": {"huber_delta": 0.1}},
    "bce": {"critic.value_loss": "bce"},
    "hl_gauss": {"critic.value_loss": "hl_gauss", "critic.value_loss_kwargs": BINS},
    "ensemble, mean": ENSEMBLE,
    "ensemble, min": {**ENSEMBLE, "critic.ensemble_reduce": "min"},
    "λ_critic 0.9": {"algorithm.lam_critic": 0.9},
    "branches": {"algorithm.branch_values": {"share": 0.125, "branches": 2}},
}
MEASURES = ("explained_variance", "bias", "rank_correlation")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--noise", type=float, default=0.1, help="standard deviation added to outcomes")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--without", nargs="+", default=[], help="kinds that are left out")
    parser.add_argument("--page", type=Path, help="a page whose tables are replaced by these")
    args = parser.parse_args()
    files, policy = walks.warm_start(args.out, args.length)
    settings = walks.base(files, policy, args.length, args.steps, args.noise)
    settings |= {"trainer.save_freq": EVERY, "trainer.max_ckpt_to_keep": None}
    runs = args.out / f"kinds_{args.length}_{args.noise:g}_{args.steps}"
    kinds = {kind: own for kind, own in KINDS.items() if kind not in args.without}
    folders = walks.run_arms(runs, settings, kinds, range(args.seeds), args.parallel, files.walk)
    found = {
        kind: [walks.scores(folder / f"seed_{seed}") for seed in range(args.seeds)] for kind, folder in folders.items()
    }
    text = tables(found, files.walk)
    print(text)
    if args.page:
        write_block(args.page, "tables", text)


def tables(found: Mapping[str, list[dict[int, dict[str, float]]]], where: Any) -> str:
    steps = sorted(next(iter(found.values()))[0])
    lines = []
    for measure in (*MEASURES, "score"):
        heads = [measure.replace("_", " "), *(f"step {step}" for step in steps)]
        lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for kind, seeds in found.items():
            cells = [walks.shown([one[step][measure] for one in seeds]) for step in steps]
            lines.append(f"| {kind} | {' | '.join(cells)} |")
        lines.append("")
    best = sum(where.to_go()[-1]) / len(where.leads) / where.length
    return "\n".join([*lines, f"The best policy scores {best:.3f}."])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
