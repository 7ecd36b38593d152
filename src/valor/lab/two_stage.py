"""`valor lab two-stage`: is a critic that PPO has trained worth something as a reward?

Stage 1 is PPO, whose critic is exported. Stage 2 starts from the same actor with that critic, frozen, while
more and more of the rule's rewards are taken away: what is left of learning, and what fills the gap? It is a sweep,
so it is compared, resumed and extended like one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from valor.config import PPOConfig, load_runs
from valor.lab import arithmetic
from valor.lab.demo import ppo_overrides, sft_overrides
from valor.lab.sweep import run_sweep
from valor.lab.sweep_file import RESERVED, SweepConfig, key_of
from valor.lab.sweep_runs import plan_sweep
from valor.trainer.checks import check

RATIOS = (0.0, 0.3, 0.5, 0.7, 1.0)
CONTROLLED = (0.5, 0.7, 1.0)  # ratios at which the critic's value stands in, and at which stage 1 is left out
POLICIES_AT = 0.7  # the ratio at which the other ways to treat a missing reward are compared
_GROUP = 8
_CRITIC = ["critic.model.path=<run:stage1>/huggingface/critic", "critic.freeze=true"]
# Validation samples as training does: a warm-started policy that is of two minds changes its likeliest answer, and so
# its greedy accuracy, for the slightest reason.
_SAMPLED = [f"actor_rollout_ref.rollout.val_kwargs.{one}" for one in ("do_sample=true", "temperature=1.0", "n=4")]
# On the demo's task the policy is right long before a critic at its side can tell right from wrong, so in stage 1 the
# critic goes ahead.
_DEMO_STAGE_ONE = ["trainer.critic_warmup=10", "trainer.test_freq=10"]
_TASK = ("actor_rollout_ref.model.path", "data.train_files")


def two_stage_arms(base: PPOConfig, stage1: Sequence[str]) -> dict[str, list[str]]:
    """The arms by name, for runs with the sizes of `base`; `stage1`: further settings of the first.

    ppo            the control: every reward by rule, the critic trained from scratch
    frozen_R       stage 2: stage 1's critic, frozen; a share R of the rewards is 0
    value_R        the same, and the critic's value stands in for the missing rewards
    bootstrap_R, exclude_R, flip_R   other ways to treat them
    fresh_R        the same masks without stage 1: the critic is trained from scratch on what is left
    random         every reward a coin
    grpo           no critic, every reward by rule; as many samples and updates a step
    stage1         PPO that makes the critic of the others
    """
    arms: dict[str, list[str]] = {"ppo": []}
    arms |= {f"frozen_{ratio:g}": [*_CRITIC, _mask(ratio)] for ratio in RATIOS}
    arms |= {f"value_{ratio:g}": [*_CRITIC, _mask(ratio), "algorithm.missing_reward=critic"] for ratio in CONTROLLED}
    others = {
        "bootstrap": "algorithm.missing_reward=bootstrap",
        "exclude": "algorithm.missing_reward=exclude",
        "flip": "algorithm.reward_mask_flip_adv_when_masked=true",
    }
    arms |= {f"{name}_{POLICIES_AT:g}": [*_CRITIC, _mask(POLICIES_AT), text] for name, text in others.items()}
    arms |= {f"fresh_{ratio:g}": [_mask(ratio)] for ratio in CONTROLLED}
    coin = "reward.custom_reward_function"
    arms["random"] = [f"{coin}.path=pkg://valor.lab.random_reward", f"{coin}.reward_kwargs.seed=<seed>"]
    prompts, update = base.data.train_batch_size, base.actor_rollout_ref.actor.ppo_mini_batch_size
    arms["grpo"] = [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.n={_GROUP * base.actor_rollout_ref.rollout.n}",
        f"data.train_batch_size={max(prompts // _GROUP, 1)}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={max(update // _GROUP, 1)}",
    ]
    arms["stage1"] = [*stage1]
    return arms


def main(argv: Sequence[str] | None = None) -> int:
    """Warm start (unless a model is given), then the sweep."""
    args = _parse(argv)
    own_task = {key_of(one) for one in args.overrides} & set(_TASK)
    base = [] if own_task else [one for one in _demo_task(args.out) if key_of(one) not in RESERVED]
    base += [f"trainer.total_training_steps={args.steps}", f"trainer.test_freq={max(args.steps // 4, 1)}"]
    base += args.overrides
    stage1 = args.stage1 or ([] if own_task else _DEMO_STAGE_ONE)
    [loaded], [first] = (load_runs(one, PPOConfig, check) for one in (base, [*base, *stage1]))
    if not any(key_of(one) == "trainer.total_training_steps" for one in stage1):
        # as many updates of the policy as the others get
        stage1 = [*stage1, f"trainer.total_training_steps={args.steps + first.config.trainer.critic_warmup}"]
    sweep = plan_sweep(
        SweepConfig(
            name="two_stage",
            base=base,
            arms=two_stage_arms(loaded.config, stage1),  # type: ignore[arg-type]
            seeds=list(range(args.seeds)),
            control="ppo",
            parallel=args.parallel,
            out=str(args.out),
        )
    )
    if not own_task and (code := _warm_start(args.out)):
        return code
    return run_sweep(sweep, rerun=args.rerun)


def _demo_task(out: Path) -> list[str]:
    """The settings of `valor demo`'s PPO run, from the warm start below; the critic goes ahead in stage 1 alone."""
    start = out / "start" / "sft" / "seed_0" / "huggingface" / "actor"
    rest = ["trainer.critic_warmup=0", "critic.ppo_mini_batch_size=64", "trainer.report=false"]
    rest += ["trainer.log_generations=0", *_SAMPLED]
    return [*ppo_overrides(start, arithmetic.data_files(out / "start" / "data"), out), *rest]


def _warm_start(out: Path) -> int:
    """The demo's model, its data, and its supervised training: the actor from which every arm starts."""
    settings = sft_overrides(out / "start" / "model", arithmetic.data_files(out / "start" / "data"), out, seed=0)
    sft = SweepConfig(
        name="warm_start",
        entry="sft",
        base=[one for one in settings if key_of(one) not in RESERVED],
        arms={"sft": None},
        seeds=[0],
        out=str(out / "start"),
    )
    sweep = plan_sweep(sft)
    if not sweep.runs[0].finished:
        arithmetic.make_model(out / "start" / "model", seed=0)
        arithmetic.make_data(out / "start" / "data", seed=0)
    return run_sweep(sweep)


def _mask(ratio: float) -> str:
    return f"algorithm.reward_mask_ratio={ratio}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="valor lab two-stage", description="PPO, then its critic as a stand-in.")
    parser.add_argument("--out", type=Path, default=Path("runs/two_stage"), help="folder (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="length of every run (default: %(default)s)")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, through Ray (default: %(default)s)")
    parser.add_argument("--stage1", action="append", metavar="key=value", help="a further setting of stage 1 alone")
    parser.add_argument("--rerun", action="store_true", help="delete and repeat runs whose settings have changed")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help=f"further settings of every run; with {' and '.join(_TASK)} on a model and data of your own",
    )
    return parser.parse_intermixed_args(argv)
