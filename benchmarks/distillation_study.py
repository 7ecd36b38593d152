"""Sampled tokens until the demo's task is solved: by a teacher, by two half-knowing ones, by oneself, and by GRPO.

    python benchmarks/distillation_study.py --out runs/distillation_study [--seeds 8] [--write PAGE]

Each seed has its own model, sums and warm start (a teacher who often forgets the carry). The student starts there in
every arm. Its teacher is what GRPO makes of the same start; the half-knowing ones are right where the first number is
below 55, or where it is not, and else always forget the carry; `self` has no teacher and no reward: the policy scores
its answers as if its prompt had named the result, which the warm start has seen (in all arms). `teacher` compares whole
distributions (reverse KL). `token`, `to_go` and `critic` know log ν of sampled tokens alone: as the token's advantage,
as rewards summed to the end, and the same with a critic's values as the baseline (GAE).

A run is validated after each step on 256 unseen sums, greedily. Tokens are the sampled ones up to the first validation
that reaches 0.99. Seed 0 tunes, with the same number of settings for each arm: samples a step (one update each, GRPO
eight to a prompt) and the learning rate; the seeds after it are scored with each arm's best.

`noise`: samples a step at which the noise of the gradient is as large as itself, tr Σ / |G|² (arXiv 1812.06162), at the
start: |G|² + tr Σ / n is the mean squared norm of gradients of n samples, measured for n = 8 and 32 at learning rate 0,
after the critic has had half of the steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
from pathlib import Path

from scipy import stats

from valor.lab import arithmetic
from valor.lab.demo import ppo_overrides, sft_overrides
from valor.trainer.main_ppo import main as ppo
from valor.trainer.main_sft import main as sft

GOAL = 0.99
ACCURACY = f"val-core/{arithmetic.DATA_SOURCE}/reward/mean@1"
HINT = "{prompt}{ground_truth}="
TEACH = [
    "distillation.enabled=true",
    "distillation.distillation_loss.use_task_rewards=false",
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
]
WHOLE = "distillation.distillation_loss.loss_mode=reverse_kl"
# Samples a step, and steps at most.
SIZES = {"grpo": {256: 12, 64: 15, 16: 30, 8: 40}}
for _arm in ("teacher", "two", "self", "token", "to_go", "critic"):
    SIZES[_arm] = {32: 15, 8: 20, 4: 30, 2: 40}
RATES = ["1e-4", "2e-4"]
TAUGHT = "grpo-64-1e-4"  # the run that makes the teacher
# The sampled token's log ν − log π as its advantage, or as its reward: summed to the end, without and with a critic.
SIGNAL = ["distillation.distillation_loss.loss_mode=k1", "distillation.distillation_loss.use_policy_gradient=true"]
FORMS = {
    "token": SIGNAL,
    "to_go": [*SIGNAL, "distillation.distillation_loss.signal=reward", "algorithm.adv_estimator=reinforce_plus_plus"],
    "critic": [*SIGNAL, "distillation.distillation_loss.signal=reward", "trainer.critic_warmup=0"],
}


def prepare(out: Path, seed: int) -> tuple[arithmetic.DataFiles, Path]:
    """Data, the students' start and its teachers, in `out`; the data and the start."""
    files, start = arithmetic.DataFiles.of(out / "data"), out / "sft" / "huggingface" / "actor"
    if (out / "done").exists():
        return files, start
    rng = random.Random(seed)
    problems = arithmetic.make_problems(rng)
    arithmetic.make_model(out / "model", seed)
    for path, part in ((files.train, problems[256:]), (files.val, problems[:256])):
        rows = ((arithmetic.question(a, b), str(a + b), {"half": _half(a)}) for a, b in part)
        arithmetic.write_prompts(path, arithmetic.DATA_SOURCE, "math", rows)

    def hinted() -> list[dict[str, str]]:
        a, b = rng.choice(problems[256:])
        if rng.random() < 0.5:
            return arithmetic.demonstration(rng, a, b)
        return _chat(f"{arithmetic.question(a, b)}{a + b}=", arithmetic.worked_answer(a, b))

    arithmetic.write_demonstrations(files, 32_000, 256, hinted)
    longer = ["data.max_length=24", "trainer.total_training_steps=1200"]
    _done(sft([*sft_overrides(out / "model", files, out / "sft", seed), *longer]))
    for half in ("low", "high"):
        own = arithmetic.DataFiles.of(out / half)

        def knows_half(half: str = half) -> list[dict[str, str]]:
            a, b = rng.choice(problems[256:])
            return _chat(arithmetic.question(a, b), arithmetic.worked_answer(a, b, forget_carry=_half(a) != half))

        arithmetic.write_demonstrations(own, 8_000, 256, knows_half)
        _done(sft([*sft_overrides(start, own, out / half, seed), "trainer.total_training_steps=300"]))
    (out / "done").touch()
    return files, start


QUIET = ["trainer.report=false", "trainer.save_freq=-1", "trainer.log_generations=0", "trainer.console_sample_freq=-1"]


def _half(a: int) -> str:
    return "low" if a < 55 else "high"


def _chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _done(code: int) -> None:
    if code:
        raise SystemExit(code)


def settings(arm: str, out: Path, samples: int) -> list[str]:
    if arm == "grpo":
        return [f"data.train_batch_size={samples // 8}", f"actor_rollout_ref.actor.ppo_mini_batch_size={samples // 8}"]
    batch = [f"data.train_batch_size={samples}", f"actor_rollout_ref.actor.ppo_mini_batch_size={samples}"]
    if arm == "self":
        return [*TEACH, *batch, *SIGNAL, f"distillation.teacher_models.me.prompt_template='{HINT}'"]
    if arm != "two":
        one = f"distillation.teacher_models.one.model_path={out / 'runs' / TAUGHT / 'huggingface' / 'actor'}"
        critic = [f"critic.ppo_mini_batch_size={samples}"] * (arm == "critic")
        return [*TEACH, *batch, *critic, one, *FORMS.get(arm, [WHOLE])]
    two = [
        f"distillation.teacher_models.{half}={{key: {half}, model_path: {out / half / 'huggingface' / 'actor'}}}"
        for half in ("low", "high")
    ]
    return [*TEACH, *batch, WHOLE, "distillation.teacher_key=half", *two]


def run(arm: str, samples: int, rate: str, out: Path, seed: int) -> None:
    """One run, unless it is there."""
    files, start = prepare(out, seed)
    folder = out / "runs" / f"{arm}-{samples}-{rate}"
    if (folder / "done").exists():
        return
    steps = [f"trainer.total_training_steps={SIZES[arm][samples]}", "trainer.test_freq=1"]
    optimizer = [f"actor_rollout_ref.actor.optim.lr={rate}"]
    base = ppo_overrides(start, files, folder, "ppo" if arm == "critic" else "grpo", seed)
    _done(ppo([*base, *settings(arm, out, samples), *steps, *optimizer, *QUIET]))
    (folder / "done").touch()


NOISE_STEPS = {8: 80, 32: 40}


def measure_noise(arm: str, out: Path, seed: int) -> None:
    """Two runs at learning rate 0, unless they are there."""
    files, start = prepare(out, seed)
    for samples, steps in NOISE_STEPS.items():
        folder = out / "runs" / f"noise-{arm}-{samples}"
        if (folder / "done").exists():
            continue
        still = [f"trainer.total_training_steps={steps}", "actor_rollout_ref.actor.optim.lr=0", "trainer.test_freq=-1"]
        base = ppo_overrides(start, files, folder, "ppo" if arm == "critic" else "grpo", seed)
        _done(ppo([*base, *settings(arm, out, samples), *still, "trainer.val_before_train=false", *QUIET]))
        (folder / "done").touch()


def noise(arm: str, out: Path) -> float:
    squares = {}
    for samples, steps in NOISE_STEPS.items():
        text = (out / "runs" / f"noise-{arm}-{samples}" / "metrics.jsonl").read_text(encoding="utf-8")
        norms = [row["actor/grad_norm"] for row in map(json.loads, text.splitlines()) if "actor/grad_norm" in row]
        squares[samples] = statistics.fmean(norm**2 for norm in norms[steps // 2 :])
    trace = (squares[8] - squares[32]) / (1 / 8 - 1 / 32)
    return trace / max(squares[32] - trace / 32, 1e-12)


def tokens_to_goal(folder: Path, samples: int) -> tuple[float, float, float]:
    """Sampled tokens up to the goal (infinite: never), accuracy before and after."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    sampled, reached = 0.0, float("inf")
    for row in rows:
        sampled += samples * row.get("response_length/mean", 0.0)
        if row.get(ACCURACY, 0.0) >= GOAL and reached == float("inf"):
            reached = sampled
    scores = [row[ACCURACY] for row in rows if ACCURACY in row]
    return reached, scores[0], scores[-1]


def tokens(out: Path, arm: str, samples: int, rate: str, seed: int) -> tuple[float, float, float]:
    return tokens_to_goal(out / str(seed) / "runs" / f"{arm}-{samples}-{rate}", samples)


def best(out: Path, arm: str) -> tuple[int, str]:
    """The arm's samples a step and rate that needed the fewest tokens with seed 0."""
    return min(((n, rate) for n in SIZES[arm] for rate in RATES), key=lambda pair: tokens(out, arm, *pair, 0)[0])


def table(out: Path, seeds: range) -> str:
    lines = [
        "| arm | samples a step | learning rate | before | after | seeds at 0.99 | tokens to 0.99, median "
        "| by seed | GRPO's / this, median (95 %) | noise, median (95 %) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    of_grpo = [tokens(out, "grpo", *best(out, "grpo"), seed)[0] for seed in seeds]
    for arm in SIZES:
        samples, rate = best(out, arm)
        values = [tokens(out, arm, samples, rate, seed) for seed in seeds]
        reached = [value[0] for value in values]
        every = ", ".join("never" if t == float("inf") else f"{t:,.0f}" for t in reached)
        mean = [statistics.mean(value[i] for value in values) for i in (1, 2)]
        solved = f"{sum(t < float('inf') for t in reached)} of {len(seeds)}"
        lines.append(
            f"| {arm} | {samples} | {rate} | {mean[0]:.2f} | {mean[1]:.3f} | {solved} "
            f"| {statistics.median(reached):,.0f} | {every} | {ratio(of_grpo, reached)} "
            f"| {median([noise(arm, out / str(seed)) for seed in seeds]) if arm in FORMS else '-'} |"
        )
    return "\n".join(lines)


def ratio(of_grpo: list[float], reached: list[float]) -> str:
    """Median of the seeds' ratios and its bootstrap interval; a seed that never reaches the goal counts as 0."""
    return median([0.0 if b == float("inf") else a / b for a, b in zip(of_grpo, reached, strict=True)])


def median(values: list[float]) -> str:
    if len(values) < 3 or float("inf") in values or len({*values}) == 1:
        return f"{statistics.median(values):.1f}"
    low, high = stats.bootstrap((values,), statistics.median, vectorized=False, rng=0).confidence_interval
    return f"{statistics.median(values):.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/distillation_study"))
    parser.add_argument("--seeds", type=int, default=8, help="scored ones, after seed 0")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    out, seeds = arguments.out, range(1, arguments.seeds + 1)
    for arm in SIZES:
        for samples in SIZES[arm]:
            for rate in RATES:
                run(arm, samples, rate, out / "0", 0)
    for seed in seeds:
        run("grpo", 64, "1e-4", out / str(seed), seed)
        for arm in SIZES:
            run(arm, *best(out, arm), out / str(seed), seed)
        for arm in FORMS:
            measure_noise(arm, out / str(seed), seed)
    text = table(out, seeds)
    print(text)
    if arguments.write:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = f"`python benchmarks/distillation_study.py --seeds {arguments.seeds}`, commit {commit}."
        arguments.write.write_text(f"# Teachers and GRPO on the demo's sums\n\n{about}\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
