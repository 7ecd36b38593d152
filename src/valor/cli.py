"""`valor …`: every command in one table. Heavy imports happen inside the command that needs them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from valor import __version__
from valor.errors import UserError


def _ppo(argv: list[str]) -> int:
    """train with PPO, GRPO or a relative: key=value … (same as python -m valor.trainer.main_ppo)"""
    from valor.trainer.main_ppo import main as run

    return run(argv)


def _sft(argv: list[str]) -> int:
    """supervised fine-tuning: key=value …"""
    from valor.trainer.main_sft import main as run

    return run(argv)


def _config(argv: list[str]) -> int:
    """config keys [PREFIX]: every key with its type, default and meaning"""
    from valor.config import describe_keys

    parser = _parser("config", "Every configuration key with its type, default and meaning.")
    parser.add_argument("what", choices=["keys"])
    parser.add_argument("prefix", nargs="?", default="", help="only keys that start with this, e.g. critic.optim")
    print(describe_keys(parser.parse_args(argv).prefix))
    return 0


def _algorithms(argv: list[str]) -> int:
    """the advantage estimators and policy losses, and what each needs"""
    _parser("algorithms", "Advantage estimators and policy losses, and what each needs.").parse_args(argv)
    from valor.algorithms import describe_algorithms

    print(describe_algorithms())
    return 0


def _data(argv: list[str]) -> int:
    """data check FILE: columns, lengths, duplicates, graders of a training file"""
    from valor.data.check import check_file
    from valor.rewards.registry import has_grader

    parser = _parser("data", "Is this file fit to train on? Exit code 1 when it is not.")
    parser.add_argument("what", choices=["check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", help="model or tokenizer path: renders a sample and measures prompts in tokens")
    parser.add_argument("--max-prompt-length", type=int, default=512, metavar="TOKENS")
    args = parser.parse_args(argv)
    if not args.file.exists():
        raise UserError(f"{args.file}: no such file; examples/data_preprocess shows how to make one")
    tokenizer = None
    if args.model:
        from valor.models.load import load_tokenizer

        tokenizer = load_tokenizer(args.model, require_chat_template=True)
    report = check_file(args.file, tokenizer, max_prompt_length=args.max_prompt_length, has_grader=has_grader)
    print(report)
    return report.exit_code


def _export(argv: list[str]) -> int:
    """export CKPT OUT [--role critic]: a checkpoint as a plain Hugging Face directory"""
    parser = _parser("export", "Write a role of a checkpoint as a plain Hugging Face directory.")
    parser.add_argument("checkpoint", type=Path, help="a global_step_N folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--role", choices=["actor", "critic"], default="actor")
    args = parser.parse_args(argv)
    from valor.trainer.export import export_checkpoint

    export_checkpoint(args.checkpoint, args.out, args.role)
    print(args.out)
    return 0


def _report(argv: list[str]) -> int:
    """report RUN_DIR: build report.html from what a run has left so far"""
    parser = _parser("report", "Build (again) the report of a run, finished or not.")
    parser.add_argument("run_dir", type=Path)
    from valor.report import build_report

    print(build_report(parser.parse_args(argv).run_dir))
    return 0


def _demo(argv: list[str]) -> int:
    """demo: make a tiny model, warm-start it, train it with PPO and a critic, look at the result"""
    from valor.lab.demo import main as run

    return run(argv)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "ppo": _ppo,
    "sft": _sft,
    "demo": _demo,
    "config": _config,
    "algorithms": _algorithms,
    "data": _data,
    "export": _export,
    "report": _report,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatch to a command. Exit code 2 with one clear line for a mistake of the user's."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if arguments[0] == "--version":
        print(f"valor {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        print(f"valor: there is no command '{name}'; there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[name](rest)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _usage() -> str:
    lines = ["usage: valor COMMAND …", ""]
    lines += [f"  {name:<12}{(function.__doc__ or '').strip()}" for name, function in COMMANDS.items()]
    return "\n".join(lines)


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"valor {command}", description=description)


if __name__ == "__main__":
    sys.exit(main())
