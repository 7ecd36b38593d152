"""Two questions, with power: how much reward can a frozen critic stand in for, and do critics beat methods without?

    python benchmarks/critic_study.py missing --out runs/critic_study --seeds 8 --parallel 2
    python benchmarks/critic_study.py methods --out runs/critic_study --seeds 8 --parallel 2
    python benchmarks/critic_study.py parts --out runs/critic_study --seeds 5 --lengths 8   # each part by itself
    python benchmarks/critic_study.py methods --out runs/critic_study --seeds 1 --lengths 8 --steps 20   # a try

Walks (`valor demo --task walk`): a chain of choices, one noisy outcome at its end. Every run generates the same number
of samples a step; a critic's warm-up counts, so that all arms of a table have spent as many tokens, but for those of
branches, which are told. What is compared is the exact expected score of the last policy, by enumeration, as the share
of the way from doors taken at random (0) to the best walks (1): no noise of evaluation is left in it.
"detectable": the difference that a paired t-test at 5 % finds with probability 0.8, given the spread over these seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch

import walks
from page import write_block
from valor.rewards.walk import Walk

RATIOS = (0.5, 0.9, 1.0)
POLICIES = ("zero", "bootstrap", "critic", "exclude")
MINI = {"critic.ensemble_size": 2, "critic.model.value_head_init": "normal"}
PHASES = Path(__file__).parents[1] / "examples" / "phases"
AGREEMENT = {**MINI, "algorithm.phases_path": str(PHASES / "agreement_mask.py")}
WITHOUT = {"trainer.critic_warmup": 0}
Arms = dict[str, dict[str, Any]]
METHODS: Arms = {
    "grpo": {"algorithm.adv_estimator": "grpo", **WITHOUT},
    "rloo": {"algorithm.adv_estimator": "rloo", **WITHOUT},
    "reinforce_plus_plus": {"algorithm.adv_estimator": "reinforce_plus_plus", **WITHOUT},
    "ppo": {},
    "ppo, λ 0.9": {"algorithm.lam_actor": 0.9},
    "ppo, random head": {"critic.model.value_head_init": "normal"},
    "ppo, bce": {"critic.value_loss": "bce"},
    "ppo, pre-trained critic": {**WITHOUT, "critic.model.path": "OWN"},
    "evpo": {"algorithm.adv_estimator": "evpo"},
    "evpo, smooth": {"algorithm.adv_estimator": "evpo", "algorithm.adv_kwargs": {"gate": "smooth"}},
    "mini-critics": MINI,
    "asyppo": AGREEMENT,
    "branches": {"algorithm.branch_values": {"share": 0.125, "branches": 2}},
}
ENTROPY = {**MINI, "actor_rollout_ref.actor.entropy_coeff": 0.003}
PROVER = {
    "enable": True,
    "gives": "progress",
    "weight": 1.0,
    "fsdp_config": {"dtype": "float32"},
}
VAPO = {
    "algorithm.adaptive_lam_alpha": 0.5,
    "actor_rollout_ref.actor.positive_nll_coef": 0.1,
    "actor_rollout_ref.actor.clip_ratio_high": 0.28,
}
STEPS = {"reward.custom_reward_function.path": str(Path(__file__).with_name("walk_step_rewards.py"))}
CRITIC_FREE = {"algorithm.adv_estimator": "reinforce_plus_plus", **WITHOUT}
PARTS: dict[str, tuple[float, Arms]] = {
    "gate": (
        0.1,
        {
            "ppo, no warm-up": WITHOUT,
            "evpo, no warm-up": {"algorithm.adv_estimator": "evpo", **WITHOUT},
            "evpo smooth, no warm-up": {
                "algorithm.adv_estimator": "evpo",
                "algorithm.adv_kwargs": {"gate": "smooth"},
                **WITHOUT,
            },
        },
    ),
    "mini_critics": (
        0.1,
        {
            "mini-critics, entropy": ENTROPY,
            "agreement mask": {**ENTROPY, **AGREEMENT},
        },
    ),
    "progress": (
        0.1,
        {
            "ppo": {},
            "progress of its own start": {"reward.reward_model": {**PROVER, "model_path": "OWN"}},
            "progress of another policy": {"reward.reward_model": {**PROVER, "model_path": "OTHER"}},
        },
    ),
    "vapo": (
        0.1,
        {
            "ppo": {},
            "length-adaptive λ": {"algorithm.adaptive_lam_alpha": 0.5},
            "imitation of right answers": {"actor_rollout_ref.actor.positive_nll_coef": 0.1},
            "all parts": VAPO,
        },
    ),
    "steps": (
        0.1,
        {
            "ppo": {},
            "steps, ppo": STEPS,
            "steps, ppo, λ 0.9": {**STEPS, "algorithm.lam": 0.9},
            "reinforce_plus_plus": CRITIC_FREE,
            "steps, reinforce_plus_plus": {**STEPS, **CRITIC_FREE},
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("question", choices=["missing", "methods", "parts"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 8], help="doors of a walk")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--noise", type=float, default=0.1, help="standard deviation added to outcomes; parts has its own"
    )
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=list(PARTS), help="of parts")
    parser.add_argument("--without", nargs="+", default=[], help="arms that are left out")
    parser.add_argument("--page", type=Path, help="a page whose table of this question is replaced by this one")
    args = parser.parse_args()
    for length in args.lengths:
        tables = of_length(args, length)
        print("\n\n".join(tables.values()), flush=True)
        if args.page:
            for name, text in tables.items():
                write_block(args.page, name, text)


def of_length(args: argparse.Namespace, length: int) -> dict[str, str]:
    """The tables of one length, by the name of their place on the page."""
    files, policy = walks.warm_start(args.out, length)
    folder, plain = args.out / f"length_{length}", walks.base(files, policy, length, args.steps, args.noise)
    own = str(walks.pretrained(folder / "own_critic", plain, files.walk, policy))
    if args.question == "missing":
        frozen = {"critic.freeze": True, "critic.model.path": own, **WITHOUT}
        arms = {"all rewards": frozen, "grpo": METHODS["grpo"]} | {
            f"{missing} {ratio:g}": {
                **frozen,
                "algorithm.reward_mask_ratio": ratio,
                "algorithm.missing_reward": missing,
            }
            for ratio, missing in product(RATIOS, POLICIES)
            if (ratio, missing) != (1.0, "exclude")  # nothing would be trained on
        }
        tables = {"missing": (args.noise, arms)}
    else:
        tables = {"methods": (args.noise, METHODS)} if args.question == "methods" else {k: PARTS[k] for k in args.only}
    texts = {}
    for name, (noise, arms) in tables.items():
        settings = walks.base(files, policy, length, args.steps, noise)
        prover = own
        if name == "progress":
            other = walks.better(folder / "other_policy", plain, files.walk)
            prover = str(walks.pretrained(folder / "other_critic", plain, files.walk, other))
        arms = {arm: own for arm, own in arms.items() if arm not in args.without}
        filled = json.loads(json.dumps(arms).replace('"OWN"', json.dumps(own)).replace('"OTHER"', json.dumps(prover)))
        runs = args.out / f"runs_{length}_{noise:g}_{args.steps}"  # arms of one name are the same runs
        folders = walks.run_arms(runs, settings, filled, range(args.seeds), args.parallel, files.walk)
        texts[f"{name} {length}"] = table(folders, files.walk, args.seeds)
    return texts


def table(folders: Mapping[str, Path], walk: Walk, seeds: int) -> str:
    """A line an arm; the first is what the others are compared with, and those with a critic also with PPO."""
    best, chance = (sum(walk.to_go(u)[-1]) / len(walk.leads) / walk.length for u in (False, True))
    control, shares = next(iter(folders)), dict[str, list[float]]()
    others = [control] if control == "ppo" or "ppo" not in folders else [control, "ppo"]
    heads = [f"{walk.length} doors", "share of the way"]
    heads += [head for other in others for head in (f"against {other}", "detectable")] + ["tokens a run", "seconds"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, folder in folders.items():
        runs = [folder / f"seed_{seed}" for seed in range(seeds)]
        last = [walks.scores(run)[max(walks.scores(run))]["score"] for run in runs]
        shares[name] = [(score - chance) / (best - chance) for score in last]
        cells = [name, walks.shown(shares[name])]
        for other in others:
            told = name != other and other in shares
            cells += walks.compared(shares[name], shares[other]) if told else ("", "")
        spent, took = (sum(of(run) for run in runs) / seeds for of in (walks.tokens, walks.seconds))
        lines.append(f"| {' | '.join(cells)} | {spent:,.0f} | {took:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
