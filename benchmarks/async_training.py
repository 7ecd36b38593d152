"""Asynchronous training on this machine: what it reaches at which age of samples, and how much sooner.

    python benchmarks/async_training.py learning --out runs/async --parallel 2   # the demo at ages 0, 1, 4 and 8
    python benchmarks/async_training.py tail --out runs/async                    # answers of heavy-tailed length
    python benchmarks/async_training.py tools --out runs/async                   # searches that take 0.5 s
    python benchmarks/async_training.py tools --out runs/async --table           # the table of the runs that are there

* `learning`: `valor demo`'s PPO run, every batch by weights exactly so many steps old (`trainer.v1.deterministic`): as
  it is, with the usual weights of tokens, and with value targets and weights that stay right (`vtrace`, prefixes).
* `tail`: sums, as in the demo, with letters behind the answer: most often six, in one answer of twelve eighty. How many
  there are brings no reward.
* `tools`: `valor demo --task search` in steps of 64 samples (one update of the policy); a search takes 0.5 s longer.

In `tail` and `tools` all arms have two processes of one thread: `sync` has two ranks that generate, then train; the
others one that trains and one that generates. Seconds are those of the steps (`timing_s/step`), to the end of the first
step at which the mean score of the last 768 samples reaches the threshold. Results, and what they say:
results/async_training.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml

from page import write_block
from valor.agents.search_loop import SearchLoop
from valor.agents.tools import ToolResult
from valor.data.files import write_parquet
from valor.lab import arithmetic, demo
from valor.lab.sweep import main as sweep
from valor.trainer.main_sft import main as sft

V1 = "trainer.v1"
AGES = (1, 4, 8)
TOOL_SECONDS = 0.5
LONGEST = 320  # tokens of an answer with its tail
ENOUGH = {"tail": 0.7, "tools": 0.9}  # mean score of 768 samples
STEPS = {"tail": 3, "tools": 12}  # that have so many
WARNED = 0.05  # of trainer.rollout_probs_diff_warn
FALL = 0.15  # in mean score: five standard deviations of a step's 256 samples
CORRECTED = {"algorithm.adv_estimator": "vtrace", "algorithm.rollout_correction.rollout_is": "prefix"}
TOKENS = {"algorithm.rollout_correction.rollout_is": "token"}
CORRECTIONS: dict[str, dict[str, Any]] = {"none": {}, "tokens": TOKENS, "vtrace": CORRECTED}


class SlowSearch(SearchLoop):
    """Search-R1's loop, each search half a second longer."""

    async def _search(self, query: str) -> ToolResult:
        await asyncio.sleep(TOOL_SECONDS)
        return await super()._search(query)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["learning", "tail", "tools"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=1, help="runs side by side; 1 where seconds count")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--page", type=Path, help="a page whose table of this study is replaced")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of the runs")
    args = parser.parse_intermixed_args()
    out, code = args.out / args.study, 0
    arms = learning_arms() if args.study == "learning" else speed_arms(args.study)
    if not args.table:
        settings = base(args.study, args.out)
        file = args.out / f"{args.study}.yaml"
        sweep_file = {**settings, "arms": arms, "seeds": list(range(args.seeds)), "parallel": args.parallel}
        file.write_text(yaml.safe_dump({**sweep_file, "name": args.study, "out": str(out)}, sort_keys=False))
        code = sweep([str(file), *args.overrides])
    if not code:
        table = (learning_table if args.study == "learning" else speed_table)(out, list(arms), args.seeds)
        print(table)
        if args.page:
            write_block(args.page, args.study, table)
    return code


def learning_arms() -> dict[str, dict[str, Any]]:
    """Every age with every correction; age 0 needs none."""
    arms: dict[str, dict[str, Any]] = {"age 0": {}}
    for age in AGES:
        fixed = {f"{V1}.trainer_mode": "separate_async", f"{V1}.deterministic": True}
        fixed[f"{V1}.sampler.max_off_policy_threshold"] = age
        arms |= {f"age {age} {name}": {**fixed, **more} for name, more in CORRECTIONS.items()}
    return {name.replace(" ", "_"): {"trainer.controller": "local", **more} for name, more in arms.items()}


def speed_arms(study: str) -> dict[str, dict[str, Any]]:
    """Two processes that do both; or one that trains and one that generates, in turn (age 0) or at once."""
    arms: dict[str, dict[str, Any]] = {"sync": {"trainer.n_gpus_per_node": 2}}
    for age in (0, 1, 4) if study == "tools" else (1, 4):
        arms[f"apart_{age}"] = {
            f"{V1}.trainer_mode": "separate_async",
            f"{V1}.sampler.max_off_policy_threshold": age,
            **({f"{V1}.sampler.max_off_policy_strategy": "wait", **CORRECTED} if age else {}),
            **({f"{V1}.num_warmup_batches": age} if age else {}),
        }
    return {name: {"trainer.controller": "ray", **more} for name, more in arms.items()}


def base(study: str, out: Path) -> dict[str, Any]:
    """What all runs of a study share: the demo's settings, its data, and a model that is warm-started once."""
    task = demo.TASKS["search" if study == "tools" else "arithmetic"]
    folder = out / f"{study}_start"
    files = task.make_data(folder / "data", 0)
    start = folder / "sft" / "huggingface" / "actor"
    settings: dict[str, Any] = {}
    more: list[str] = []
    if study == "tail":
        rng = random.Random(0)
        problems = arithmetic.make_problems(rng)[256:]
        chats = [{"messages": with_tail(rng, *rng.choice(problems))} for _ in range(16_000)]
        write_parquet({files.sft_train: chats[256:], files.sft_val: chats[:256]})
        more = [f"data.max_length={LONGEST + 20}"]
        settings |= {"data.max_response_length": LONGEST, "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0}
        settings["trainer.total_training_steps"] = 28
    if study == "tools":
        loop = {"name": "slow_search", "_target_": f"{Path(__file__).resolve()}:SlowSearch"}
        (folder / "loops.yaml").write_text(yaml.safe_dump([loop]))
        settings["actor_rollout_ref.rollout.agent.agent_loop_config_path"] = str(folder / "loops.yaml")
        settings["actor_rollout_ref.rollout.agent.default_agent_loop"] = "slow_search"
        settings |= {"data.train_batch_size": 64, "trainer.critic_warmup": 20, "trainer.total_training_steps": 104}
    if study != "learning":
        settings |= {"trainer.val_before_train": False, "trainer.test_freq": -1}
    if not start.is_dir():
        task.make_model(folder / "model", 0)
        if sft([*demo.sft_overrides(folder / "model", files, folder / "sft", 0), *more]):
            raise SystemExit("the warm start failed")
    path, name, *rest = demo.ppo_overrides(start, files, folder)
    kept = [word for word in rest if not word.startswith(("trainer.seed=", "trainer.default_local_dir="))]
    settings |= dict(word.split("=", 1) for word in kept)
    where = {"config_path": path.partition("=")[2], "config_name": name.partition("=")[2]}
    return {"base": {**settings, "trainer.report": False, "trainer.log_generations": 0}, **where}


def with_tail(rng: random.Random, a: int, b: int) -> list[dict[str, str]]:
    """A demonstration of the demo's teacher, and a few letters a, or many letters b, behind the answer."""
    user, answer = arithmetic.demonstration(rng, a, b)
    letter, mean = ("b", 80.0) if rng.random() < 1 / 12 else ("a", 6.0)
    number = min(1 + int(rng.expovariate(1 / mean)), LONGEST - 13)  # a worked answer has 12 tokens
    return [user, {**answer, "content": f"{answer['content']} {letter * number}"}]


def steps(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run's steps."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "critic/score/mean" in row]


def learning_table(out: Path, arms: list[str], seeds: int) -> str:
    """Accuracy at the end and what the report shows before."""
    heads = ["arm", "accuracy at the end, by seed", "score, last 5 steps", "worst score after step 20"]
    heads += ["warned of at step, by seed", "fell at step, by seed", "effective sample size, least", "k3_kl, most"]
    heads += ["explained variance, last 5"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for arm in arms:
        runs = [out / arm / f"seed_{seed}" for seed in range(seeds) if (out / arm / f"seed_{seed}").is_dir()]
        ends = [demo.read_results(run)[1].validation for run in runs]
        rows = [steps(run) for run in runs]

        def of(key: str, which: slice, rows: list[list[dict[str, Any]]] = rows) -> list[float]:
            return [row[key] for run in rows for row in run[which] if key in row]

        size, kl = of("rollout_corr/eff_sample_size", slice(None)), of("rollout_corr/k3_kl", slice(None))
        cells = [
            arm.replace("_", " "),
            " ".join(f"{end:.3f}" for end in ends),
            f"{statistics.fmean(of('critic/score/mean', slice(-5, None))):.3f}",
            f"{min(of('critic/score/mean', slice(20, None)), default=float('nan')):.3f}",
            " ".join(map(first_warning, rows)),
            " ".join(map(first_fall, rows)),
            f"{min(size):.2f}" if size else "",
            f"{max(kl):.4f}" if kl else "",
            f"{statistics.fmean(of('critic/vf_explained_var', slice(-5, None))):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def first_warning(run: list[dict[str, Any]]) -> str:
    """The step whose line in the console says that samples are off-policy: at trainer.rollout_probs_diff_warn."""
    return next((str(row["step"]) for row in run if row.get("training/rollout_probs_diff_mean", 0.0) > WARNED), "-")


def first_fall(run: list[dict[str, Any]]) -> str:
    """The first step with a score so far below the best before."""
    scores = [row["critic/score/mean"] for row in run]
    return next((str(run[i]["step"]) for i in range(10, len(run)) if scores[i] < max(scores[:i]) - FALL), "-")


def speed_table(out: Path, arms: list[str], seeds: int) -> str:
    """Seconds to the threshold and of a step, and who waited."""
    heads = [
        "arm",
        f"seconds to a score of {ENOUGH[out.name]}, by seed",
        "as a multiple of sync's",
        "step",
        "seconds a step",
    ]
    heads += ["trainer waits", "generator waits", "age", "tokens an answer, of a step: mean, longest", "last score"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    reference: list[float] = []
    for arm in arms:
        runs = [steps(out / arm / f"seed_{seed}") for seed in range(seeds) if (out / arm / f"seed_{seed}").is_dir()]
        reached = [time_to(run, out.name) for run in runs]
        seconds = [second for second, _ in reached]
        reference = reference or seconds
        ratios = [a / b for a, b in zip(reference, seconds, strict=False)]

        def mean(key: str, runs: list[list[dict[str, Any]]] = runs) -> str:
            found = [row[key] for run in runs for row in run[3:] if key in row]
            return f"{statistics.fmean(found):.2f}" if found else ""

        cells = [
            arm.replace("_", ", age "),
            " ".join(f"{second:.1f}" for second in seconds),
            " ".join(f"{ratio:.2f}" for ratio in ratios),
            " ".join(str(step) for _, step in reached),
            mean("timing_s/step"),
            mean("trainer/idle_ratio"),
            mean("rollouter/idle_ratio"),
            mean("off_policy/age/mean"),
            f"{mean('response_length/mean')}, {mean('response_length/max')}",
            f"{statistics.fmean(run[-1]['critic/score/mean'] for run in runs):.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def time_to(run: list[dict[str, Any]], study: str) -> tuple[float, int]:
    """Seconds and steps until the mean score is enough; infinite where it never is."""
    seconds, window = 0.0, STEPS[study]
    for number, row in enumerate(run):
        seconds += row["timing_s/step"]
        last = [one["critic/score/mean"] for one in run[max(number + 1 - window, 0) : number + 1]]
        if len(last) == window and statistics.fmean(last) >= ENOUGH[study]:
            return seconds, row["step"]
    return float("inf"), 0


if __name__ == "__main__":
    sys.exit(main())
