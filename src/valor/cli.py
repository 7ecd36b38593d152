"""`valor …`: every command in one table; what a command needs is imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from valor import __version__
from valor.errors import exit_code

# "module:function", the function taking the remaining arguments and returning the exit code, and a line of help.
COMMANDS: dict[str, tuple[str, str]] = {
    "ppo": ("valor.trainer.main_ppo:main", "train with PPO, GRPO or a relative: key=value …"),
    "sft": ("valor.trainer.main_sft:main", "supervised fine-tuning: key=value …"),
    "rm train": ("valor.trainer.main_sft:rm_train", "a reward model from preference pairs: key=value …"),
    "demo": (
        "valor.lab.demo:main",
        "[--task search]: a tiny model made, warm-started and trained by PPO here",
    ),
    "critic pretrain": ("valor.trainer.main_ppo:critic_pretrain", "fit a critic to rollouts: key=value …"),
    "critic score": ("valor.lab.critic_score:main", "the scorecard of a critic: key=value …"),
    "critic search": ("valor.lab.critic_search:main", "answers that a critic chooses or searches for: key=value …"),
    "critic publish": ("valor.lab.publish:main", "CKPT_OR_HF_DIR OUT: a critic as a model with its card"),
    "lab sweep": ("valor.lab.sweep:main", "FILE.yaml: arms x seeds of a command, with intervals and tests"),
    "config keys": ("valor.cli:config_keys", "[PREFIX]: every key with its type, default and meaning"),
    "algorithms": ("valor.cli:algorithms", "the advantage estimators and losses, and what each needs"),
    "data prepare": ("valor.data.prepare:main", "[NAME]: a public data set, or your own, as files to train on"),
    "rewards list": ("valor.rewards.registry:main", "which grader scores which data_source, and its components"),
    "rewards sandbox": ("valor.sandbox.levels:main", "how this machine encloses code of models"),
    "retrieve": ("valor.agents.search.server:main", "CORPUS: a search server for agents over documents of yours"),
    "serve": ("valor.lab.serve:main", "MODEL: an OpenAI-compatible server to try agents with, which records episodes"),
    "export": ("valor.cli:export", "CKPT OUT [--role critic]: a checkpoint as a Hugging Face directory"),
    "report": ("valor.cli:report", "RUN_DIR: build report.html from what a run has left so far"),
}


def config_keys(argv: list[str]) -> int:
    """Print every configuration key."""
    from valor.config import describe_keys

    parser = _parser("config keys", "Every configuration key with its type, default and meaning.")
    parser.add_argument("prefix", nargs="?", default="", help="only keys that start with this, e.g. critic.optim")
    print(describe_keys(parser.parse_args(argv).prefix))
    return 0


def algorithms(argv: list[str]) -> int:
    """Print the registries."""
    _parser("algorithms", "Advantage estimators and losses, and what each needs.").parse_args(argv)
    from valor.algorithms import describe_algorithms

    print(describe_algorithms())
    return 0


def export(argv: list[str]) -> int:
    """Write a role of a checkpoint as a plain Hugging Face directory."""
    parser = _parser("export", "Write a role of a checkpoint as a plain Hugging Face directory.")
    parser.add_argument("checkpoint", type=Path, help="a global_step_N folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--role", default="actor", help="actor (default), critic, critic_2, … or reward_model")
    args = parser.parse_args(argv)
    from valor.trainer.export import export_checkpoint

    export_checkpoint(args.checkpoint, args.out, args.role)
    print(args.out)
    return 0


def report(argv: list[str]) -> int:
    """Build (again) the report of a run."""
    parser = _parser("report", "Build (again) the report of a run, finished or not.")
    parser.add_argument("run_dir", type=Path)
    from valor.report import build_report

    print(build_report(parser.parse_args(argv).run_dir))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatch to a command. Exit code 2 with one clear line for a mistake of the user's."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if arguments[0] == "--version":
        print(f"valor {__version__}")
        return 0
    words = 2 if " ".join(arguments[:2]) in COMMANDS else 1
    name, rest = " ".join(arguments[:words]), arguments[words:]
    if name not in COMMANDS:
        print(_unknown(arguments), file=sys.stderr)
        return 2
    module, _, function = COMMANDS[name][0].partition(":")
    try:
        return exit_code(lambda: getattr(importlib.import_module(module), function)(rest))
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _unknown(arguments: list[str]) -> str:
    first = arguments[0]
    family = [name for name in COMMANDS if name.startswith(f"{first} ")]
    if family:
        return f"valor {first}: say which: {', '.join(f'valor {name}' for name in family)}"
    return f"valor: there is no command '{first}'; there are: {', '.join(COMMANDS)}"


def _usage() -> str:
    lines = ["usage: valor COMMAND …", ""]
    lines += [f"  {name:<17}{about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(lines)


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"valor {command}", description=description)


if __name__ == "__main__":
    sys.exit(main())
