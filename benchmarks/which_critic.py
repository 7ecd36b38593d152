#!/usr/bin/env python3
"""Which critic, if any: GRPO, RLOO, REINFORCE++ and PPO with several critics at equal tokens, on walks of eight doors.

    python benchmarks/which_critic.py [--seeds 8] [--parallel 2] [--out runs/which_critic] [--noise 0.5] [--kl]

Every arm has four settings to choose from, by two seeds that are not scored; with `--kl`, by four: then policies are
held to their start by a KL loss, with two coefficients to choose from in place of learning rates. A policy is scored
exactly, by all walks from all rooms. Nothing has a warm-up. Writes results/which_critic.md from the runs that have
ended; starting it again goes on where it stopped.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from valor.lab.statistics import sign_flip_p
from valor.rewards.walk import Walk
from walks import base, compared, run_arms, scores, seconds, shown, tokens, warm_start

PAGE = Path(__file__).parent / "results" / "which_critic.md"
LENGTH = 8
STEPS = {0.0: 40, 0.5: 60}  # by the noise of outcomes
CONTROL = "GRPO"
TUNING_SEEDS = {False: (100, 101), True: (100, 101, 102, 103)}  # without and with `--kl`
LOST = 0.3  # a share below which a run has forgotten how to walk, or learnt nothing

POLICY_LR = "actor_rollout_ref.actor.optim.lr"
KL = "actor_rollout_ref.actor.kl_loss_coef"
WITHOUT_CRITIC = [{POLICY_LR: lr} for lr in (3e-4, 5e-4, 1e-3, 2e-3)]
CLOSED_FORM = [{POLICY_LR: lr, "algorithm.lam": lam} for lr in (5e-4, 1e-3) for lam in (0.7, 0.9)]
OWN_RETURNS = [
    {POLICY_LR: lr, "algorithm.lam": lam, "algorithm.lam_critic": 1.0} for lr in (5e-4, 1e-3) for lam in (0.5, 0.9)
]
WITH_REPLAY = [
    {POLICY_LR: 1e-3, "algorithm.lam": 0.9, "algorithm.lam_critic": 1.0, "critic.replay_steps": steps}
    for steps in (4, 8)
]
EXACT = Path(__file__).parents[1] / "examples" / "phases" / "exact_values.py"
ARMS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    CONTROL: ({"algorithm.adv_estimator": "grpo"}, WITHOUT_CRITIC),
    "RLOO": ({"algorithm.adv_estimator": "rloo"}, WITHOUT_CRITIC),
    "REINFORCE++": ({"algorithm.adv_estimator": "reinforce_plus_plus"}, WITHOUT_CRITIC),
    "PPO": ({}, OWN_RETURNS),
    "PPO, residual": ({"critic.target": "residual"}, OWN_RETURNS),
    "PPO, replay": ({}, WITH_REPLAY),
    "PPO, anchored": ({"critic.target": "anchored"}, OWN_RETURNS),
    "closed form": ({"critic.kind": "probe"}, CLOSED_FORM),
    "closed form, λ auto": ({"critic.kind": "probe", "algorithm.lam": "auto"}, WITHOUT_CRITIC),
    "closed form, residual": ({"critic.kind": "probe", "critic.target": "residual"}, CLOSED_FORM),
    "exact values": (
        {"critic.kind": "probe", "algorithm.phases_path": str(EXACT)},
        [{POLICY_LR: lr, "algorithm.lam": lam} for lr in (5e-4, 1e-3) for lam in (0.0, 0.5)],
    ),
}


def grid(arm: str, kl: bool) -> list[dict[str, Any]]:
    """The settings that an arm chooses from."""
    settings = ARMS[arm][1]
    if not kl:
        return settings
    rates = (1e-3,) if "algorithm.lam" in settings[0] else (5e-4, 1e-3)
    held = [{"actor_rollout_ref.actor.use_kl_loss": True, KL: coefficient} for coefficient in (0.01, 0.03)]
    return [setting | term for setting in settings if setting[POLICY_LR] in rates for term in held]


def share(run: Path, walk: Walk) -> float:
    """The exact score of a run's last policy, between doors at random, 0, and the best walks, 1."""
    score = next(reversed(scores(run).values()))["score"]
    chance, best = chance_and_best(walk)
    return (score - chance) / (best - chance)


def chance_and_best(walk: Walk) -> tuple[float, float]:
    """Mean scores of doors taken at random and of the best walks."""
    best, chance = (sum(walk.to_go(u)[-1]) / len(walk.leads) / walk.length for u in (False, True))
    return chance, best


def short(setting: Mapping[str, Any]) -> str:
    """What was chosen, as the table says it."""
    lam = f", λ {setting['algorithm.lam']:g}" if "algorithm.lam" in setting else ""
    kl = f", KL {setting[KL]:g}" if KL in setting else ""
    replay = f", replay {setting['critic.replay_steps']}" if "critic.replay_steps" in setting else ""
    return f"lr {setting[POLICY_LR]:.0e}{lam}{replay}{kl}"


def tuned(out: Path, settings: dict[str, Any], arm: str, kl: bool, parallel: int, walk: Walk) -> dict[str, Any]:
    """The setting of an arm whose mean share over the tuning seeds is best."""
    named = {f"{arm} {short(setting)}": ARMS[arm][0] | setting for setting in grid(arm, kl)}
    folders = run_arms(out / "tuning", settings, named, TUNING_SEEDS[kl], parallel, walk)
    means = {
        name: sum(share(folder / f"seed_{seed}", walk) for seed in TUNING_SEEDS[kl]) for name, folder in folders.items()
    }
    return grid(arm, kl)[list(named).index(max(means, key=means.__getitem__))]


def table(folders: dict[str, Path], chosen: dict[str, dict[str, Any]], walk: Walk, noise: float) -> str:
    """Share of what can be won, over the seeds whose runs have ended in every arm."""
    ended = [{run.name for run in folder.glob("seed_*") if scores(run)} for folder in folders.values()]
    seeds = sorted(set.intersection(*ended))
    rows = [
        "| arm | chosen | share of what can be won | minus GRPO | detectable | p | lost runs | tokens | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    shares = {name: [share(folder / seed, walk) for seed in seeds] for name, folder in folders.items()}
    for name, values in shares.items():
        against = ["", "", ""]
        if name != CONTROL:
            gaps = [a - b for a, b in zip(values, shares[CONTROL], strict=True)]
            against = [*compared(values, shares[CONTROL]), f"{sign_flip_p(gaps):.3f}"]
        lost = sum(value < LOST for value in values)
        used, took = (sum(f(folders[name] / seed) for seed in seeds) / len(seeds) for f in (tokens, seconds))
        cells = [name, short(chosen[name]), shown(values), *against, str(lost), f"{used:,.0f}", f"{took:.0f}"]
        rows.append("| " + " | ".join(cells) + " |")
    return f"{len(seeds)} seeds.\n\n<!-- {noise:g} -->\n" + "\n".join(rows) + f"\n<!-- /{noise:g} -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/which_critic"))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--noise", type=float, nargs="+", default=[*STEPS], choices=[*STEPS])
    parser.add_argument("--kl", action="store_true", help="hold policies to their start by a KL loss")
    parser.add_argument("--arms", nargs="+", default=[*ARMS], choices=[*ARMS])
    args = parser.parse_args()
    files, policy = warm_start(args.out, LENGTH)
    page = [
        "# Which critic, if any",
        "",
        "Written by `benchmarks/which_critic.py`: walks of eight doors, 256 samples a step (32 prompts of 8), no "
        f"warm-up; four settings an arm, chosen by {len(TUNING_SEEDS[args.kl])} seeds that are not scored. Mean and "
        "95 % interval over seeds, "
        "paired differences; a lost run ends below 0.3.",
    ]
    for noise in args.noise:
        out = args.out / f"noise_{noise:g}{'_kl' if args.kl else ''}"
        settings = base(files, policy, LENGTH, STEPS[noise], noise) | {"trainer.critic_warmup": 0}
        chosen = {arm: tuned(out, settings, arm, args.kl, args.parallel, files.walk) for arm in args.arms}
        arms = {arm: ARMS[arm][0] | setting for arm, setting in chosen.items()}
        for seeds in range(1, args.seeds + 1):  # seed by seed, so that there is a table at any time
            folders = run_arms(out, settings, arms, range(seeds), args.parallel, files.walk)
        page += [
            "",
            f"## Noise of outcomes {noise:g}, {STEPS[noise]} steps",
            "",
            table(folders, chosen, files.walk, noise),
        ]
    PAGE.write_text("\n".join(page) + "\n")
    print("\n".join(page))


if __name__ == "__main__":
    main()
