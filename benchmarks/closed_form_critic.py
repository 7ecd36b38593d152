#!/usr/bin/env python3
"""The critic in closed form (critic.kind=probe) against GRPO at equal tokens, on walks of eight doors.

    python benchmarks/closed_form_critic.py [--seeds 8] [--parallel 2] [--out runs/closed_form] [--noise 0 0.1 0.5]

Writes results/closed_form_critic.md from the runs that have ended; starting it again goes on where it stopped. A policy
is scored exactly, by all walks from all rooms. Both arms have settings of earlier studies: GRPO's best learning rate,
and lambda 0.9 for the critic. There is no warm-up.
"""

import argparse
from pathlib import Path

from valor.rewards.walk import Walk
from walks import base, compared, run_arms, scores, shown, tokens, warm_start

RESULTS = Path(__file__).parent / "results" / "closed_form_critic.md"
LENGTH = 8
STEPS = {0.0: 40, 0.1: 40, 0.5: 60}  # by the noise of outcomes
CONTROL = "GRPO"
ARMS = {
    CONTROL: {"algorithm.adv_estimator": "grpo"},
    "PPO, closed form": {"critic.kind": "probe", "algorithm.lam": 0.9},
}


def share(score: float, walk: Walk) -> float:
    """Where an exact score lies between doors at random, 0, and the best walks, 1."""
    best, chance = (sum(walk.to_go(u)[-1]) / len(walk.leads) / walk.length for u in (False, True))
    return (score - chance) / (best - chance)


def table(folders: dict[str, Path], walk: Walk) -> str:
    """Share of what can be won, over the seeds whose runs have ended in every arm."""
    ended = [{run.name for run in folder.glob("seed_*") if scores(run)} for folder in folders.values()]
    seeds = sorted(set.intersection(*ended))
    rows = [
        "| arm | share of what can be won | minus GRPO | detectable | lost runs | tokens a run |",
        "|---|---|---|---|---|---|",
    ]
    found = {
        name: [share(next(reversed(scores(folder / seed).values()))["score"], walk) for seed in seeds]
        for name, folder in folders.items()
    }
    for name, values in found.items():
        gap, effect = ("", "") if name == CONTROL else compared(values, found[CONTROL])
        lost = sum(value < 0.3 for value in values)
        used = sum(tokens(folders[name] / seed) for seed in seeds) // max(len(seeds), 1)
        rows.append(f"| {name} | {shown(values)} | {gap} | {effect} | {lost} | {used:,} |")
    return f"{len(seeds)} seeds.\n\n" + "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/closed_form"))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--noise", type=float, nargs="+", default=[*STEPS], choices=[*STEPS])
    parser.add_argument("--table", action="store_true", help="write the page of the runs there are, and run none")
    args = parser.parse_args()
    files, policy = warm_start(args.out, LENGTH)
    page = ["# The critic in closed form against GRPO", "", "Written by `benchmarks/closed_form_critic.py`: walks of "]
    page[-1] += (
        "eight doors, 256 samples a step, 32 prompts of 8; mean and 95 % interval over seeds, paired differences."
    )
    for noise in args.noise:
        name = f"noise_{noise:g}"
        settings = base(files, policy, LENGTH, STEPS[noise], noise) | {"trainer.critic_warmup": 0}
        if args.table:
            folders = {
                arm: args.out / name / folder for arm, folder in zip(ARMS, ("GRPO", "PPO-closed-form"), strict=True)
            }
        else:
            folders = {}
            for seeds in range(1, args.seeds + 1):  # seed by seed, so that there is a table at any time
                folders = run_arms(args.out / name, settings, ARMS, seeds, args.parallel, files.walk)
        page += ["", f"## Noise of outcomes {noise:g}, {STEPS[noise]} steps", "", table(folders, files.walk)]
    RESULTS.write_text("\n".join(page) + "\n")
    print("\n".join(page))


if __name__ == "__main__":
    main()
