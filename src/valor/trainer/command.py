"""What every training command does with its command line, from the arguments to the exit code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from valor.config import LoadedConfig, Section, load
from valor.errors import exit_code
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
    command = shlex.join(["valor", *words.split(), *arguments])
    check = partial(_check, aloud="--dry-run" not in arguments)
    return exit_code(lambda: _run(load(arguments, root, check), command, start))


def _run(loaded: LoadedConfig[Root], command: str, start: Start[Root]) -> int:
    from valor.trainer.checks import inert_settings
    from valor.trainer.plan import plan

    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    print(plan(loaded.config, loaded.explicit_keys, loaded.presets), flush=True)
    if loaded.dry_run:
        return 0
    for key, reason in inert_settings(loaded.config, loaded.explicit_keys).items():
        print(f"note: {key}: {reason}", file=sys.stderr)
    with show_progress():
        return start(loaded.config, command)


def _check(config: Section, *, aloud: bool) -> list[str]:
    if aloud:
        print("the configuration is read; loading torch and what the run needs", flush=True)
    from valor.trainer.checks import check

    return check(config)
