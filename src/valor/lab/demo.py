"""`valor demo`: a tiny model, a warm start by SFT, PPO with a critic (or GRPO), and a look at what came out.

Nothing is downloaded, and nothing here is special: the two command lines that are printed are what is run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from valor.lab import arithmetic
from valor.tracking.console import format_seconds, say
from valor.tracking.rundir import METRICS_FILE

ROLES = {"ppo": ("actor", "critic"), "grpo": ("actor",)}
_SAMPLES_PER_STEP = 256
_SAMPLES_PER_UPDATE = 64
CRITIC_WARMUP = 10  # steps
_GROUP = 8  # grpo: samples per prompt
# A second thread gains little on matrices this small, and waits for the first one when the machine has other work.
_PLACE = ("trainer.device=cpu", "trainer.num_threads=1")


@dataclass(frozen=True)
class Accuracy:
    """Greedy accuracy on the validation problems, and mean reward of the samples drawn for training (T = 1)."""

    validation: float
    sampled: float


def main(argv: Sequence[str] | None = None) -> int:
    """Make, warm-start, train, check. Exit code of the step that failed, else 0."""
    args = _parse(argv)
    out: Path = args.out
    began = time.monotonic()
    say(f"[1/4] a tiny model and its arithmetic problems in {out}")
    arithmetic.make_model(out / "model", seed=args.seed)
    files = arithmetic.make_data(out / "data", seed=args.seed)

    say("[2/4] warm start: supervised training on the answers of a teacher who often forgets the carry")
    code = _run("sft", sft_overrides(out / "model", files, out / "sft", args.seed))
    if code:
        return code

    say(f"[3/4] {args.algorithm.upper()} on the same kind of problems, rewarded for right results alone")
    run_dir = out / args.algorithm
    start = out / "sft" / "huggingface" / "actor"
    code = _run("ppo", [*ppo_overrides(start, files, run_dir, args.algorithm, args.seed), *args.overrides])
    if code:
        return code

    say("[4/4] what came out, loaded with plain transformers")
    for role in ROLES[args.algorithm]:
        say(f"  {role:<8} {run_dir / 'huggingface' / role}  {_loaded(run_dir / 'huggingface' / role, role)}")
    for name in ("report.html", METRICS_FILE):
        if (run_dir / name).exists():
            say(f"  {name.partition('.')[0]:<8} {run_dir / name}")
    before, after = read_accuracy(run_dir)
    unseen = pq.read_metadata(files.val).num_rows
    say(f"accuracy on {unseen} unseen problems, greedy: {before.validation:.3f} -> {after.validation:.3f}")
    say(f"mean reward of the samples drawn in training: {before.sampled:.3f} -> {after.sampled:.3f}")
    say(f"{format_seconds(time.monotonic() - began)} in all")
    return 0


def sft_overrides(model: Path, files: arithmetic.DataFiles, run_dir: Path, seed: int) -> list[str]:
    """The warm start as settings of `valor sft`."""
    return [
        f"model.path={model}",
        "model.enable_gradient_checkpointing=false",
        f"data.train_files={files.sft_train}",
        f"data.val_files={files.sft_val}",
        f"data.max_length={arithmetic.MAX_PROMPT_TOKENS + arithmetic.MAX_RESPONSE_TOKENS}",
        "data.train_batch_size=64",
        "optim.lr=4e-3",
        "optim.betas=[0.9,0.95]",
        "optim.lr_scheduler_type=cosine",
        "optim.lr_warmup_steps=20",
        "fsdp_config.dtype=float32",
        "trainer.total_training_steps=600",
        "trainer.test_freq=200",
        *_PLACE,
        f"trainer.seed={seed}",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={run_dir}",
    ]


def ppo_overrides(
    model: Path, files: arithmetic.DataFiles, run_dir: Path, algorithm: str = "ppo", seed: int = 0
) -> list[str]:
    """The RL run as settings of `valor ppo`: the same samples per step and per update for both algorithms."""
    n = _GROUP if algorithm == "grpo" else 1
    settings = [
        f"algorithm.adv_estimator={'grpo' if algorithm == 'grpo' else 'gae'}",
        f"data.train_files={files.train}",
        f"data.val_files={files.val}",
        f"data.max_prompt_length={arithmetic.MAX_PROMPT_TOKENS}",
        f"data.max_response_length={arithmetic.MAX_RESPONSE_TOKENS}",
        f"data.train_batch_size={_SAMPLES_PER_STEP // n}",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"actor_rollout_ref.rollout.n={n}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={_SAMPLES_PER_UPDATE // n}",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=5",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    ]
    if algorithm == "ppo":
        settings += ["critic.optim.lr=1e-3", "critic.model.enable_gradient_checkpointing=false"]
        # The policy is right long before a critic at its side can tell right from wrong: the critic goes ahead, with
        # twice as many updates.
        settings.append(f"critic.ppo_mini_batch_size={_SAMPLES_PER_UPDATE // 2}")
        settings.append(f"trainer.critic_warmup={CRITIC_WARMUP}")
    return [
        *settings,
        "reward.num_workers=1",
        f"trainer.total_training_steps={30 + (CRITIC_WARMUP if algorithm == 'ppo' else 0)}",
        "trainer.test_freq=10",
        *_PLACE,
        f"trainer.seed={seed}",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={run_dir}",
    ]


def read_accuracy(run_dir: Path) -> tuple[Accuracy, Accuracy]:
    """Before training (the first step still samples from the old policy) and after the last step, from the metrics."""
    lines = [json.loads(line) for line in (run_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
    validation = [v for m in lines for k, v in m.items() if k.startswith("val-core/") and k.endswith("/mean@1")]
    sampled = [m["critic/score/mean"] for m in lines if "critic/score/mean" in m]
    return Accuracy(validation[0], sampled[0]), Accuracy(validation[-1], sampled[-1])


def _run(command: str, overrides: Sequence[str]) -> int:
    """Print the command line and run it in this process."""
    from valor.trainer import main_ppo, main_sft

    main_of = {"ppo": main_ppo.main, "sft": main_sft.main}[command]
    module = f"valor.trainer.main_{command}"
    say(" \\\n    ".join([f"  python -m {module}", *map(shlex.quote, overrides)]))
    return main_of(list(overrides))


def _loaded(folder: Path, role: str) -> str:
    """Load the exported model as anybody would, and say in a few words what it does."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # the process ends with this report
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": arithmetic.question(58, 77)}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        if role == "critic":
            critic = AutoModelForTokenClassification.from_pretrained(folder)
            return f"(value of {chat[0]['content']} is {critic(input_ids=ids).logits[0, -1, 0].item():.2f})"
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    return f"({chat[0]['content']} {tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)})"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="valor demo", description="Train a tiny model from nothing, on this machine.")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="folder for everything (default: %(default)s)"
    )
    parser.add_argument("--algorithm", choices=list(ROLES), default="ppo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of the RL run")
    return parser.parse_args(argv)
