"""The command line of every training command, from the arguments to the exit code."""

import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, TypeVar

from valor.config import LoadedConfig, Section, load
from valor.config.loading import contradictions
from valor.errors import UserError, exit_code
from valor.tracking.console import show_progress

Root = TypeVar("Root", bound=Section)
Start = Callable[[Root, str], int]


def run_command(words: str, root: type[Root], start: Start[Root], argv: Sequence[str] | None = None) -> int:
    """Run the command line of `valor WORDS`; None: this process's own.

    `start(config, command)` does the run. The exit code is what it returns, or that of an early end (valor.errors).
    torch is imported once the configuration is valid in itself, so that a mistake in it is told at once.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run(words, arguments, root, start))


def trains(name: str) -> Start[Any]:
    """A function that builds and runs `name`, a `module:Class`; on a node after the first (trainer.node_rank) it serves
    that run."""

    def start(config: Any, command: str) -> int:
        from valor.controller.nodes import node_zero, serve
        from valor.trainer.checks import placed

        rank = getattr(config.trainer, "node_rank", None)
        if rank:
            return serve(config.trainer, placed(config))
        run = resolve_name(name)(config, command)
        with nullcontext() if rank is None else node_zero(config.trainer, run.placement):
            return run.fit()

    return start


def load_checked(argv: Sequence[str], root: type[Root]) -> LoadedConfig[Root]:
    """`valor.config.load` with the checks of those who act on the configuration, which import torch. UserError: every
    mistake, a line each."""
    return load(argv, root, _check, _derive)


def _check(config: Any) -> list[str]:
    return import_module("valor.trainer.checks").check(config)


def _derive(config: Any) -> dict[str, Any]:
    return import_module("valor.trainer.checks").derived(config)


def _run(words: str, arguments: Sequence[str], root: type[Root], start: Start[Root]) -> int:
    """UserError: all mistakes in the configuration; of --dry-run also all that this machine lacks for it."""
    dry_run, lacks = "--dry-run" in arguments, list[str]()

    def check(config: Any) -> list[str]:
        if dry_run:
            lacks.extend(import_module("valor.trainer.dry_run").lacking(config))
        return _check(config)

    def derive(config: Any) -> dict[str, Any]:
        if not dry_run:
            if lines := import_module("valor.trainer.missing").missing(config):
                raise UserError("\n".join([*contradictions(config), *lines]))
            print("the configuration is read; loading torch and what the run needs", flush=True)
        return _derive(config)

    try:
        loaded = load(arguments, root, check, derive)
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
    """Print what was read otherwise than written, and what has no effect (in a dry run the plan tells that)."""
    from valor.trainer.checks import inert_settings, lacks_memory, lost_in_rounding

    notes = [*loaded.notes, *lost_in_rounding(loaded.config), *lacks_memory(loaded.config)]
    if not loaded.dry_run:
        inert = inert_settings(loaded.config, loaded.explicit_keys)
        notes += [f"{key}: {reason}" for key, reason in inert.items()]
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
