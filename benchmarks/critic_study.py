"""Two questions, with power: how much reward can a frozen critic stand in for, and do critics beat methods without?

    python benchmarks/critic_study.py missing --out runs/critic_study --seeds 8 --lengths 4 8 12
    python benchmarks/critic_study.py methods --out runs/critic_study --seeds 8 --lengths 4 8 12
    python benchmarks/critic_study.py methods --out runs/critic_study --seeds 1 --lengths 8 --steps 20   # a try

Walks (`valor demo --task walk`): a chain of choices, one noisy outcome at its end. Every run generates the same number
of samples a step; a critic's warm-up counts, so that all arms of a table have spent as many tokens, but for those of
branches, which are told. What is compared is the exact expected score of the last policy, by enumeration, as the share
of the way from doors taken at random (0) to the best walks (1): no noise of evaluation is left in it.
"detectable": the difference that a paired t-test at 5 % finds with probability 0.8, given the spread over these seeds.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import torch

import walks
from page import write_block

RATIOS = (0.5, 0.9, 1.0)
POLICIES = ("zero", "bootstrap", "critic", "exclude")
MINI = {"critic.ensemble_size": 2, "critic.ensemble_shards": True, "critic.model.value_head_init": "normal"}
WITHOUT = {"trainer.critic_warmup": 0}
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm.adv_estimator": "grpo", **WITHOUT},
    "rloo": {"algorithm.adv_estimator": "rloo", **WITHOUT},
    "reinforce_plus_plus": {"algorithm.adv_estimator": "reinforce_plus_plus", **WITHOUT},
    "ppo": {},
    "ppo-lam0.9": {"algorithm.lam_actor": 0.9},
    "evpo": {"algorithm.adv_estimator": "evpo"},
    "evpo-smooth": {"algorithm.adv_estimator": "evpo", "algorithm.adv_kwargs": {"gate": "smooth"}},
    "mini-critics": MINI,
    "asyppo": {**MINI, "algorithm.agreement_mask": 0.2},
    "branches": {"algorithm.branch_values": {"share": 0.25, "branches": 4}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("question", choices=["missing", "methods"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 8, 12], help="doors of a walk")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--noise", type=float, default=0.1, help="standard deviation added to outcomes")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--page", type=Path, help="a page whose table of this question is replaced by this one")
    args = parser.parse_args()
    tables = [of_length(args, length) for length in args.lengths]
    text = "\n\n".join(tables)
    print(text)
    if args.page:
        write_block(args.page, args.question, text)


def of_length(args: argparse.Namespace, length: int) -> str:
    """A line an arm."""
    files, policy = walks.warm_start(args.out, length)
    settings = walks.base(files, policy, length, args.steps, args.noise)
    if args.question == "missing":
        frozen = {"critic.freeze": True, "critic.model.path": str(walks.pretrained(args.out, files, policy, length))}
        settings |= WITHOUT
        arms = {"all rewards": frozen, "grpo, all rewards": {"algorithm.adv_estimator": "grpo"}} | {
            f"{missing} {ratio:g}": {
                **frozen,
                "algorithm.reward_mask_ratio": ratio,
                "algorithm.missing_reward": missing,
            }
            for ratio, missing in product(RATIOS, POLICIES)
            if (ratio, missing) != (1.0, "exclude")  # nothing would be trained on
        }
    else:
        arms = METHODS
    folders = {name: name.replace(",", "").replace(" ", "-") for name in arms}
    runs = args.out / f"{args.question}_{length}_{args.noise:g}_{args.steps}"
    own = {folders[name]: dict(given) for name, given in arms.items()}
    walks.run_arms(runs, settings, own, args.seeds, args.parallel)
    best, chance = (sum(files.walk.to_go(u)[-1]) / len(files.walk.leads) / length for u in (False, True))
    shares, spent, took = {}, {}, {}
    for name, folder in folders.items():
        seeds = [runs / folder / f"seed_{seed}" for seed in range(args.seeds)]
        scores = [walks.states(files.walk, run / "huggingface" / "actor").score for run in seeds]
        shares[name] = [(score - chance) / (best - chance) for score in scores]
        spent[name], took[name] = (sum(of(run) for run in seeds) / len(seeds) for of in (walks.tokens, walks.seconds))
    control = next(iter(arms))
    heads = [f"{length} doors", "share of the way", f"against {control}", "detectable", "tokens a run", "seconds a run"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, values in shares.items():
        gap, effect = ("", "") if name == control else walks.compared(values, shares[control])
        lines.append(f"| {name} | {walks.shown(values)} | {gap} | {effect} | {spent[name]:,.0f} | {took[name]:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
