"""Sampled tokens until the demo's task is solved: by a teacher, by two half-knowing ones, by oneself, and by GRPO.

    python benchmarks/distillation_study.py --out runs/distillation_study [--seeds 8] [--arms ARM ...]
        [--write PAGE]

All arms begin at one warm start, of a teacher who often forgets the carry; seeds draw rows and samples. The teacher is
what GRPO makes of that start; the half-knowing ones are right where the first number is below 55, or where it is not,
and else always forget the carry; `self` has no teacher and no reward: the policy scores its answers as if its prompt
had named the result, which the warm start has seen. `teacher` compares whole distributions (reverse KL). `token`,
`to_go` and `critic` know log ν of sampled tokens alone: as the token's advantage, as rewards summed to the end, and the
same with a critic's values as the baseline (GAE).

A run is validated after each step on 256 unseen sums, greedily. Tokens are the sampled ones up to the first validation
that reaches 0.99. The learning rate is the demo's; seed 0 chooses each arm's number of samples a step, of four, and
whether they serve one update or two (no warm-up; GRPO has eight to a prompt), and the seeds after it are scored.

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
from collections.abc import Sequence
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
]
WHOLE = "distillation.distillation_loss.loss_mode=reverse_kl"
Size = tuple[int, int]  # samples a step, updates on them
_STEPS = {256: 12, 64: 15, 32: 15, 16: 30, 8: 40, 4: 30, 2: 40}  # at most, by samples
SIZES = {"grpo": [(samples, updates) for samples in (256, 64, 16, 8) for updates in (1, 2)]}
for _arm in ("teacher", "two", "self", "token", "to_go", "critic"):
    SIZES[_arm] = [(samples, updates) for samples in (32, 8, 4, 2) for updates in (1, 2)]
TAUGHT = ("grpo", (64, 1), 0)  # the run that makes the teacher: arm, size, seed
# The sampled token's log ν − log π as its advantage, or as its reward: summed to the end, without and with a critic.
SIGNAL = ["distillation.distillation_loss.loss_mode=k1", "distillation.distillation_loss.use_policy_gradient=true"]
NOISE_STEPS = {8: 80, 32: 40}
FORMS = {
    "token": SIGNAL,
    "to_go": [*SIGNAL, "distillation.distillation_loss.signal=reward", "algorithm.adv_estimator=reinforce_plus_plus"],
    "critic": [*SIGNAL, "distillation.distillation_loss.signal=reward", "trainer.critic_warmup=0"],
}


def prepare(out: Path) -> tuple[arithmetic.DataFiles, Path]:
    """Data, the students' start and its half-knowing teachers, in `out`; the data and the start."""
    files, start = arithmetic.DataFiles.of(out / "data"), out / "sft" / "huggingface" / "actor"
    if (out / "done").exists():
        return files, start
    rng = random.Random(0)
    problems = arithmetic.make_problems(rng)
    arithmetic.make_model(out / "model")
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
    _done(sft([*sft_overrides(out / "model", files, out / "sft", 0), *longer]))
    for half in ("low", "high"):
        own = arithmetic.DataFiles.of(out / half)

        def knows_half(half: str = half) -> list[dict[str, str]]:
            a, b = rng.choice(problems[256:])
            return _chat(arithmetic.question(a, b), arithmetic.worked_answer(a, b, forget_carry=_half(a) != half))

        arithmetic.write_demonstrations(own, 8_000, 256, knows_half)
        _done(sft([*sft_overrides(start, own, out / half, 0), "trainer.total_training_steps=300"]))
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


def settings(arm: str, out: Path, size: Size) -> list[str]:
    samples, updates = size
    prompts = samples // 8 if arm == "grpo" else samples
    batch = [f"data.train_batch_size={prompts}", f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}"]
    batch.append(f"actor_rollout_ref.actor.ppo_epochs={updates}")
    if arm == "grpo":
        return batch
    if arm == "self":
        return [*TEACH, *batch, *SIGNAL, f"distillation.teacher_models.me.prompt_template='{HINT}'"]
    if arm != "two":
        one = f"distillation.teacher_models.one.model_path={folder(out, *TAUGHT) / 'huggingface' / 'actor'}"
        critic = [f"critic.ppo_mini_batch_size={samples}"] * (arm == "critic")
        return [*TEACH, *batch, *critic, one, *FORMS.get(arm, [WHOLE])]
    two = [
        f"distillation.teacher_models.{half}={{key: {half}, model_path: {out / half / 'huggingface' / 'actor'}}}"
        for half in ("low", "high")
    ]
    return [*TEACH, *batch, WHOLE, "distillation.teacher_key=half", *two]


def folder(out: Path, arm: str, size: Size, seed: int) -> Path:
    return out / "runs" / f"{arm}-{size[0]}x{size[1]}-seed{seed}"


def run(out: Path, arm: str, size: Size, seed: int) -> None:
    """One run, unless it is there."""
    _run(out, arm, size, seed, folder(out, arm, size, seed), _STEPS[size[0]], ["trainer.test_freq=1"])


def measure_noise(out: Path, arm: str, seed: int) -> None:
    """Two runs at learning rate 0, unless they are there."""
    still = ["actor_rollout_ref.actor.optim.lr=0", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    for samples, steps in NOISE_STEPS.items():
        _run(out, arm, (samples, 1), seed, folder(out, f"noise-{arm}", (samples, 1), seed), steps, still)


def _run(out: Path, arm: str, size: Size, seed: int, into: Path, steps: int, more: list[str]) -> None:
    if (into / "done").exists():
        return
    base = ppo_overrides(prepare(out)[1], prepare(out)[0], into, "ppo" if arm == "critic" else "grpo", seed)
    length = [f"trainer.total_training_steps={steps}", "actor_rollout_ref.actor.optim.lr_warmup_steps=0"]
    _done(ppo([*base, *settings(arm, out, size), *length, *more, *QUIET]))
    (into / "done").touch()


def metrics(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def noise(out: Path, arm: str, seed: int) -> float:
    squares = {}
    for samples, steps in NOISE_STEPS.items():
        rows = metrics(folder(out, f"noise-{arm}", (samples, 1), seed))
        norms = [row["actor/grad_norm"] for row in rows if "actor/grad_norm" in row]
        squares[samples] = statistics.fmean(norm**2 for norm in norms[steps // 2 :])
    trace = (squares[8] - squares[32]) / (1 / 8 - 1 / 32)
    return trace / max(squares[32] - trace / 32, 1e-12)


def tokens_to_goal(out: Path, arm: str, size: Size, seed: int) -> tuple[float, float, float]:
    """Sampled tokens up to the goal (infinite: never), accuracy before and after."""
    sampled, reached, rows = 0.0, float("inf"), metrics(folder(out, arm, size, seed))
    for row in rows:
        sampled += size[0] * row.get("response_length/mean", 0.0)
        if row.get(ACCURACY, 0.0) >= GOAL and reached == float("inf"):
            reached = sampled
    scores = [row[ACCURACY] for row in rows if ACCURACY in row]
    return reached, scores[0], scores[-1]


def best(out: Path, arm: str) -> Size:
    """The size that needed the fewest tokens with seed 0."""
    return min(SIZES[arm], key=lambda size: tokens_to_goal(out, arm, size, 0)[0])


def table(out: Path, arms: Sequence[str], seeds: range) -> str:
    lines = [
        "| arm | samples a step x updates | before | after | seeds at 0.99 | tokens to 0.99, median "
        "| by seed | GRPO's / this, median (95 %) | noise, median (95 %) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    of_grpo = [tokens_to_goal(out, "grpo", best(out, "grpo"), seed)[0] for seed in seeds]
    for arm in arms:
        values = [tokens_to_goal(out, arm, best(out, arm), seed) for seed in seeds]
        reached = [value[0] for value in values]
        every = ", ".join("never" if t == float("inf") else f"{t:,.0f}" for t in reached)
        before, after = (statistics.mean(value[i] for value in values) for i in (1, 2))
        ratios = [0.0 if b == float("inf") else a / b for a, b in zip(of_grpo, reached, strict=True)]
        lines.append(
            f"| {arm} | {best(out, arm)[0]} x {best(out, arm)[1]} | {before:.2f} | {after:.3f} "
            f"| {sum(t < float('inf') for t in reached)} of {len(seeds)} | {statistics.median(reached):,.0f} | {every} "
            f"| {median(ratios)} | {median([noise(out, arm, seed) for seed in seeds]) if arm in FORMS else '-'} |"
        )
    return "\n".join(lines)


def median(values: list[float]) -> str:
    """With its 95 % bootstrap interval."""
    if len(values) < 3 or float("inf") in values or len({*values}) == 1:
        return f"{statistics.median(values):.1f}"
    low, high = stats.bootstrap((values,), statistics.median, vectorized=False, rng=0).confidence_interval
    return f"{statistics.median(values):.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/distillation_study"))
    parser.add_argument("--seeds", type=int, default=8, help="scored ones, after seed 0")
    parser.add_argument("--arms", nargs="+", choices=[*SIZES], default=[*SIZES])
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    out, seeds = arguments.out, range(1, arguments.seeds + 1)
    run(out, *TAUGHT)
    for arm in arguments.arms:
        for size in SIZES[arm]:
            run(out, arm, size, 0)
    for seed in seeds:
        for arm in arguments.arms:
            run(out, arm, best(out, arm), seed)
        for arm in FORMS.keys() & {*arguments.arms}:
            measure_noise(out, arm, seed)
    text = table(out, arguments.arms, seeds)
    print(text)
    if arguments.write:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = f"`python benchmarks/distillation_study.py --seeds {arguments.seeds}`, commit {commit}."
        arguments.write.write_text(f"# Teachers and GRPO on the demo's sums\n\n{about}\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
