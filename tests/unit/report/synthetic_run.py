"""A run folder as a real PPO run would leave it, made from a few smooth curves, noise and invented arithmetic."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from valor.tracking.generations import Sample, write_samples
from valor.tracking.loggers import RunInfo, Tracker
from valor.tracking.metrics import histogram
from valor.tracking.rundir import write_run_info

HOSTILE = "</script><script>window.hacked = true</script><!-- <img src=x onerror=window.hacked=true> & \u2028 "

CONFIG = """\
data:
  train_files: data/gsm8k/train.parquet
  val_files: data/gsm8k/test.parquet
  train_batch_size: 64
  max_prompt_length: 256
  max_response_length: 256
actor_rollout_ref:
  model:
    path: HuggingFaceTB/SmolLM2-135M-Instruct
  actor:
    ppo_mini_batch_size: 32
    optim: {lr: 1.0e-06, lr_warmup_steps: 10}
    use_kl_loss: true
    kl_loss_coef: 0.001
  rollout: {name: native, n: 4, temperature: 1.0}
critic:
  enable: true
  model:
    path: HuggingFaceTB/SmolLM2-135M-Instruct
  optim: {lr: 1.0e-05}
algorithm:
  adv_estimator: gae
  gamma: 1.0
  lam: 0.95
  filter_groups: null
trainer:
  project_name: arithmetic
  experiment_name: smollm2-ppo-critic
  total_epochs: 3
  logger: [console, file]
  notes: "<b>not bold</b> & unset"
"""


def make_run(run_dir: Path, *, steps: int = 120, critic: bool = True, seed: int = 0) -> Path:
    """Write metrics.jsonl, config.yaml, run.json and samples/ for `steps` steps; without `critic`, a GRPO-like run."""
    rng = np.random.default_rng(seed)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(CONFIG if critic else CONFIG.replace("gae", "grpo"), encoding="utf-8")
    with Tracker(["file"], RunInfo(run_dir)) as tracker:
        for step in range(steps + 1):
            tracker.log(step, _step_metrics(rng, step, steps, critic))
    for step in sorted({1, steps // 4, steps // 2, steps} - {0}):
        write_samples(run_dir, step, [_sample(rng, step / steps, critic) for _ in range(4)])
    if critic:
        write_samples(run_dir, steps // 2 + 1, [_episode(rng)])
    unjudged = [replace(_sample(rng, 1.0, critic), advantages=None, values=None, returns=None) for _ in range(3)]
    write_samples(run_dir, steps, unjudged, split="val")
    write_run_info(
        run_dir,
        versions={"valor-rl": "0.1.0", "torch": "2.13.0"},
        command="valor ppo data.train_files=data/gsm8k/train.parquet trainer.total_epochs=3",
    )
    return run_dir


def _step_metrics(rng: np.random.Generator, step: int, steps: int, critic: bool) -> dict[str, Any]:
    t = step / steps
    skill = 0.52 + 0.42 / (1 + math.exp(-9 * (t - 0.4)))
    noise = rng.normal
    metrics: dict[str, Any] = {}
    if step % max(steps // 12, 1) == 0:
        for source, ease in (("openai/gsm8k", 0.0), ("arithmetic/two_digit", 0.08)):
            metrics[f"val-core/{source}/acc/mean@4"] = min(1.0, skill + ease + noise(0, 0.012))
            metrics[f"val-core/{source}/acc/pass@4"] = min(1.0, skill + ease + 0.1)
            metrics[f"val-core/{source}/acc/maj@4"] = min(1.0, skill + ease + 0.05)
    if step == 0:
        return metrics
    length = 92 + 40 * t + noise(0, 4)
    metrics |= {
        "training/global_step": step,
        "critic/score/mean": skill + noise(0, 0.04),
        "critic/rewards/mean": skill - 0.02 * t + noise(0, 0.04),
        "actor/pg_loss": noise(0, 0.01) - 0.01,
        "actor/pg_clipfrac": 0.04 + 0.02 * abs(noise()),
        "actor/pg_clipfrac_lower": 0.002 * abs(noise()),
        "actor/ppo_kl": 2e-4 * abs(noise()),
        "actor/kl_loss": 0.03 * t**0.7 + 0.001 * abs(noise()),
        "actor/entropy": 1.1 - 0.55 * t + noise(0, 0.02),
        "actor/grad_norm": math.inf if step == steps // 3 else 0.6 + 0.15 * abs(noise()) + (4 if step % 37 == 0 else 0),
        "actor/lr": 1e-6 * min(1, step / 10),
        "response_length/mean": length,
        "response_length/max": min(256.0, length * 2.1 + noise(0, 9)),
        "response_length/min": length * 0.3 + noise(0, 2),
        "response_length/clip_ratio": max(0.0, 0.06 * (1 - t) + noise(0, 0.006)),
        "training/rollout_probs_diff_mean": 3e-7 * (1 + 0.3 * abs(noise())),
        "training/rollout_probs_diff_max": 4e-6 * (1 + abs(noise())),
        "training/rollout_log_probs_diff_mean": 7e-7 * (1 + 0.3 * abs(noise())),
        "training/rollout_log_probs_diff_max": 9e-6 * (1 + abs(noise())),
        "reward/format_ok": 0.7 + 0.3 * t,
        "perf/total_num_tokens": 64 * 4 * (length + 80),
        "perf/throughput": 1300 + 60 * noise(),
    }
    seconds = {"gen": 9.0 + 2 * t, "reward": 0.3, "old_log_prob": 0.0, "ref": 1.9, "adv": 0.05, "update_actor": 6.1}
    if critic:
        metrics |= {
            "critic/vf_loss": 0.25 * math.exp(-3 * t) + 0.03 + 0.01 * abs(noise()),
            "critic/vf_explained_var": 0.82 * (1 - math.exp(-5 * t)) - (6 if step == 1 else 0) + noise(0, 0.03),
            "critic/vf_clipfrac": 0.1 * math.exp(-4 * t),
            "critic/grad_norm": 2.4 * math.exp(-2 * t) + 0.2 * abs(noise()),
            "critic/lr": 1e-5,
            "critic/values/mean": skill * (1 - math.exp(-8 * t)) + noise(0, 0.01),
            "critic/returns/mean": skill + noise(0, 0.02),
        }
        metrics |= {f"critic/vf_abs_error/fifth_{k}": 0.45 - 0.05 * k - 0.15 * t + 0.01 * noise() for k in range(1, 6)}
        metrics |= {
            "episode/turns/mean": 2.5 + t,
            "episode/turns/max": 4.0,
            "episode/rows": 1.2,
            "episode/tool_calls": 1.5 + t + noise(0, 0.1),
            "episode/tool_errors": 0.4 * (1 - t),
            "episode/tool_seconds": 0.6,
            "episode/policy_tokens": 60.0,
            "episode/observation_tokens": 140.0,
            "episode/cut_off": 0.1,
            "episode/failed": 0.0,
        }
        metrics |= {f"critic/vf_explained_var/turn_{k}": 0.1 * k + 0.4 * t + noise(0, 0.03) for k in range(1, 4)}
        for name, centre in (("values", skill), ("returns", skill), ("advantages", 0.0)):
            tokens = rng.normal(centre, 0.3 - 0.15 * t, 400)
            metrics[f"critic/{name}/histogram"] = histogram(tokens, np.ones(400))
        seconds |= {"values": 1.7, "update_critic": 5.4}
    seconds = {phase: value * (1 + 0.08 * abs(noise())) for phase, value in seconds.items()}
    metrics |= {f"timing_s/{phase}": value for phase, value in seconds.items()}
    ends = np.cumsum(list(seconds.values())).tolist()
    metrics |= {f"timing_began_s/{phase}": end - seconds[phase] for phase, end in zip(seconds, ends, strict=True)}
    metrics["timing_s/step"] = sum(seconds.values()) + 0.6
    if step % max(steps // 12, 1) == 0:
        metrics["timing_s/testing"] = 7.5
    return metrics


def _sample(rng: np.random.Generator, t: float, critic: bool) -> Sample:
    a, b, c = (int(n) for n in rng.integers(11, 60, 3))
    right = bool(rng.random() < 0.45 + 0.5 * t)
    said = a * b + c if right else a * b + c + int(rng.integers(1, 9))
    text = (
        f"First, find how many apples are in the boxes: {a} boxes times {b} apples is {a * b} apples.\n"
        f"Then add the {c} loose apples: {a * b} + {c} = {said}.\n\n#### {said}"
    )
    tokens = [*_pieces(text), *([] if right else [" ", HOSTILE]), "<|im_end|>"]
    n = len(tokens)
    slip = n if right else int(n * 0.62)
    values = [0.35 + 0.4 * t + (0.25 if right else -0.5) * max(0.0, (i - slip * 0.4) / n) for i in range(n)]
    values = [float(value + rng.normal(0, 0.03)) for value in values]
    reward = 1.0 if right else 0.0
    advantages = [reward - values[i] + (-1.2 if not right and slip <= i < slip + 4 else 0.0) for i in range(n)]
    return Sample(
        prompt=(
            f"<|im_start|>user\nA shop has {a} boxes with {b} apples each and {c} loose apples. How many apples are"
            " there in the shop? Think step by step; end with #### and the number.<|im_end|>\n<|im_start|>assistant\n"
        ),
        tokens=tokens,
        reward=reward,
        uid=f"{a}-{b}-{c}",
        data_source="openai/gsm8k",
        ground_truth=str(a * b + c),
        finish_reason="stop",
        mask=[1] * n,
        advantages=advantages,
        values=values if critic else None,
        returns=[reward] * n if critic else None,
        log_probs=[float(-abs(rng.gamma(0.35, 0.9))) for _ in range(n)],
        reward_info={"acc": reward},
    )


def _episode(rng: np.random.Generator) -> Sample:
    """Three turns: a call that is answered, one that fails, and, in a row of its own, the answer."""
    said = [
        "I look it up.<tool_call>search</tool_call>",
        "Again.<tool_call>serch</tool_call>",
        "It is Oslo.<|im_end|>",
    ]
    told = [f"\n<|im_start|>tool\n{HOSTILE} Oslo is the capital.<|im_end|>\n<|im_start|>assistant\n"]
    parts = [(1, said[0]), (0, told[0]), (2, said[1]), (3, said[2])]
    tokens = [(turn, piece) for turn, text in parts for piece in _pieces(text)]
    turns = [turn for turn, _ in tokens]
    values = [None if not turn else 0.2 * turn + float(rng.normal(0, 0.01)) for turn in turns]
    values[turns.index(2) + 3] = 0.95  # here the critic changes its mind
    calls = [
        {"turn": 1, "name": "search", "arguments": {"query": HOSTILE}, "text": HOSTILE * 9, "error": None},
        {"turn": 2, "name": "serch", "arguments": {}, "text": "Error: unknown tool 'serch'.", "error": "unknown"},
    ]
    return Sample(
        prompt="<|im_start|>user\nWhat is the capital of Norway?<|im_end|>\n<|im_start|>assistant\n",
        tokens=[piece for _, piece in tokens],
        reward=1.0,
        finish_reason="stop",
        mask=[int(turn > 0) for turn in turns],
        turns=turns,
        advantages=[None if value is None else 1 - value for value in values],
        values=values,
        episode={
            "calls": [call | {"reward": 0.0, "seconds": 0.41, "metrics": {}} for call in calls],
            "turn_rewards": [0.0, -0.5, 0.0],
            "outcome": 1.0,
            "rows": [{"at": turns.index(3), "prompt": "<|im_start|>user\nall that came before, rewritten"}],
        },
    )


def _pieces(text: str) -> list[str]:
    """Something like a tokenizer's cut: words with their leading blank, digits one by one."""
    pieces: list[str] = []
    for char in text:
        joins = pieces and char.isalpha() and (pieces[-1][-1].isalpha() or pieces[-1] == " ")
        if joins and len(pieces[-1]) < 8:
            pieces[-1] += char
        else:
            pieces.append(char)
    return pieces
