"""What every training command does with its command line, from the arguments to the exit code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from valor.config import Section, load
from valor.errors import TrainingStopped, UserError

Root = TypeVar("Root", bound=Section)
Start = Callable[[Root, str], int]


def run_command(words: str, argv: Sequence[str] | None, root: type[Root], start: Start[Root]) -> int:
    """Run the command line of `valor WORDS`; None: this process's own.

    `start(config, command)` does the run that was asked for by `command`. Exit code 0; 1: the run ended itself; 2: a
    mistake in what was asked for; otherwise what `start` returned. torch and the models are imported once the tree
    is valid in itself, so that a mistake in it is told at once.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        loaded = load(arguments, root, _check)
        from valor.trainer.checks import inert_settings
        from valor.trainer.plan import plan

        for note in loaded.notes:
            print(f"note: {note}", file=sys.stderr)
        if loaded.dry_run:
            print(plan(loaded.config, loaded.explicit_keys))
            return 0
        for key, reason in inert_settings(loaded.config, loaded.explicit_keys).items():
            print(f"note: {key}: {reason}", file=sys.stderr)
        return start(loaded.config, shlex.join(["valor", *words.split(), *arguments]))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except TrainingStopped as reason:
        print(f"stopped: {reason}", file=sys.stderr)
        return 1


def _check(config: Section) -> list[str]:
    from valor.trainer.checks import check

    return check(config)
