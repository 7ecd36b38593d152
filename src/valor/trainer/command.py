"""What every training command does with its command line, from the arguments to the exit code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic import BaseModel

from valor.config import LoadedConfig, inert_settings, load_runs
from valor.errors import UserError

Root = TypeVar("Root", bound=BaseModel)
Start = Callable[[Root, str], int]


def run_command(words: str, argv: Sequence[str] | None, root: type[Root], start: Start[Root]) -> int:
    """Run (each job of) the command line of `valor WORDS`; None: this process's own.

    `start(config, command)` does the run that was asked for by `command`; it imports torch and the models, so that a
    mistake in the configuration is told at once. Exit code 0; 1: the run ended itself; 2: a mistake in what was asked
    for; otherwise what `start` returned.
    """
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        for loaded in load_runs(arguments, root, _check):
            code = _run(loaded, shlex.join(["valor", *words.split(), *arguments]), start)
            if code:
                return code
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _check(config: BaseModel) -> list[str]:
    from valor.trainer.checks import check  # torch: after the tree itself has been found valid

    return check(config)


def _run(loaded: LoadedConfig[Root], command: str, start: Start[Root]) -> int:
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    if loaded.dry_run:
        from valor.trainer.plan import plan

        print(plan(loaded.config, loaded.explicit_keys))
        return 0
    for key, reason in inert_settings(loaded.config, loaded.explicit_keys):
        print(f"note: {key}: {reason}", file=sys.stderr)
    from valor.errors import TrainingStopped

    try:
        return start(loaded.config, command)
    except TrainingStopped as reason:
        print(f"stopped: {reason}", file=sys.stderr)
        return 1
