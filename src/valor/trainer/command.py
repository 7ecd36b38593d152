"""What every training command does with its command line, from the arguments to the exit code."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pkgutil import resolve_name
from typing import Any, TypeVar

from valor.config import LoadedConfig, Section, load
from valor.errors import UserError, exit_code
from valor.tracking.console import show_progress

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


def trains(name: str) -> Start[Any]:
    """The start of the run that `name`, a class as `module:Class`, makes of a configuration and a command, and makes
    again where it ends early. On a node after the first (trainer.node_rank) it serves that run."""

    def start(config: Any, command: str) -> int:
        from valor.controller.nodes import node_zero, serve
        from valor.trainer.checks import placed
        from valor.trainer.run import fit_again

        rank = getattr(config.trainer, "node_rank", None)
        if rank:
            return serve(config.trainer, placed(config))
        again = partial(resolve_name(name), config, command)
        run = again()
        with nullcontext() if rank is None else node_zero(config.trainer, run.placement):
            return fit_again(run, again)

    return start


def check(config: Any) -> list[str]:
    """As `valor.trainer.checks.check`, which imports torch."""
    from valor.trainer import checks

    return checks.check(config)


def derived(config: Any) -> Mapping[str, Any]:
    """As `valor.trainer.checks.derived`, which imports torch."""
    from valor.trainer import checks

    return checks.derived(config)


def _run(words: str, arguments: Sequence[str], root: type[Root], start: Start[Root]) -> int:
    """UserError: all that is wrong with the configuration; of --dry-run also all that it lacks on this machine."""
    dry_run, lacks = "--dry-run" in arguments, list[str]()

    def look(config: Any) -> list[str]:
        if dry_run:
            from valor.trainer.dry_run import lacking

            lacks.extend(lacking(config))
        else:
            print("the configuration is read; loading torch and what the run needs", flush=True)
        return check(config)

    try:
        loaded = load(arguments, root, look, derived)
    except UserError as error:
        raise UserError("\n".join(dict.fromkeys([*str(error).splitlines(), *lacks]))) from None
    from valor.trainer.plan import plan

    tell_notes(loaded)
    print(plan(loaded.config, loaded.explicit_keys, loaded.presets), flush=True)
    if lacks:
        raise UserError("\n".join(lacks))
    if dry_run:
        return 0
    with show_progress():
        return start(loaded.config, shlex.join(["valor", *words.split(), *arguments]))


def tell_notes(loaded: LoadedConfig[Root]) -> None:
    """Say what was read otherwise than it was written, and (but for a plan, which says it) what has no effect."""
    from valor.trainer.checks import inert_settings, lost_in_rounding

    notes = [*loaded.notes, *lost_in_rounding(loaded.config)]
    if not loaded.dry_run:
        inert = inert_settings(loaded.config, loaded.explicit_keys)
        notes += [f"{key}: {reason}" for key, reason in inert.items()]
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
