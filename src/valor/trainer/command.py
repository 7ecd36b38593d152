"""What every training command does with its command line, from the arguments to the exit code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from valor.config import LoadedConfig, Section, load
from valor.errors import UserError, exit_code
from valor.tracking.progress_console import show_progress

Root = TypeVar("Root", bound=Section)
Start = Callable[[Root, str], int]


def run_command(words: str, argv: Sequence[str] | None, root: type[Root], start: Start[Root]) -> int:
    """Run the command line of `valor WORDS`; None: this process's own.

    `start(config, command)` does the run that was asked for by `command`. The exit code is what `start` returned, or
    that of an early end (valor.errors). torch and the models are imported once the tree is valid in itself, so that a
    mistake in it is told at once.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run(words, arguments, root, start))


def _run(words: str, arguments: Sequence[str], root: type[Root], start: Start[Root]) -> int:
    if "--dry-run" in arguments:
        return _dry_run(arguments, root)
    loaded = load_checked(arguments, root, aloud=True)
    from valor.trainer.plan import plan

    tell_notes(loaded)
    print(plan(loaded.config, loaded.explicit_keys, loaded.presets), flush=True)
    with show_progress():
        return start(loaded.config, command_line(words, arguments))


def _dry_run(arguments: Sequence[str], root: type[Root]) -> int:
    """Print the plan. UserError: all that is wrong with the configuration, and all that it lacks on this machine."""
    lacks: list[str] = []

    def look(config: Any) -> list[str]:
        from valor.trainer.dry_run import lacking

        lacks.extend(lacking(config))
        return _check(config, aloud=False)

    try:
        loaded = load(arguments, root, look)
    except UserError as error:
        raise UserError("\n".join([str(error), *lacks])) from None
    from valor.trainer.plan import plan

    tell_notes(loaded)
    print(plan(loaded.config, loaded.explicit_keys, loaded.presets), flush=True)
    if lacks:
        raise UserError("\n".join(lacks))
    return 0


def load_checked(arguments: Sequence[str], root: type[Root], *, aloud: bool = False) -> LoadedConfig[Root]:
    """The configuration that was asked for, with which a run can begin; `aloud` says what takes its time. UserError:
    every mistake, a line each."""
    return load(arguments, root, partial(_check, aloud=aloud))


def command_line(words: str, arguments: Sequence[str]) -> str:
    """What one would type."""
    return shlex.join(["valor", *words.split(), *arguments])


def tell_notes(loaded: LoadedConfig[Root]) -> None:
    """Say what was read otherwise than it was written, and (but for a plan, which says it) what has no effect."""
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    if not loaded.dry_run:
        from valor.trainer.checks import inert_settings

        for key, reason in inert_settings(loaded.config, loaded.explicit_keys).items():
            print(f"note: {key}: {reason}", file=sys.stderr)


def _check(config: Section, *, aloud: bool) -> list[str]:
    if aloud:
        print("the configuration is read; loading torch and what the run needs", flush=True)
    from valor.trainer.checks import check

    return check(config)
