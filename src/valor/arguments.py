"""Command lines by click: a mistake is one line, an option may take several words, help ends with an example."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from valor.errors import UserError

PAGES = "https://valor-rl.github.io/valor"
PATH = click.Path(path_type=Path)
option = partial(click.option, show_default=True)


class Command(click.Command):
    """A command; called with words, it runs them and returns the exit code.

    An option with `multiple` takes several words: --local A B. UserError: words that it does not understand.
    """

    def __call__(self, words: Sequence[str]) -> int:  # type: ignore[override]
        return run(self, words, f"valor {self.name}")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        several = {flag for param in self.params if getattr(param, "multiple", False) for flag in param.opts}
        words, flag = list[str](), ""
        for word in args:
            if word.startswith("-"):
                flag = word
            elif flag in several and words[-1] != flag:
                words.append(flag)
            words.append(word)
        return super().parse_args(ctx, words)


def command(
    name: str, example: str, page: str, *, passes_options: bool = False, cls: type[Command] = Command, **more: Any
) -> Callable[[Callable], Command]:
    """A function as a command. Help ends with an example and the page that says more.

    `passes_options`: those that it does not know are among the words of its last argument. `more`: of click.command.
    """
    settings = {"help_option_names": ["-h", "--help"], "ignore_unknown_options": passes_options}
    epilog = f"\b\nExample:\n  {example}\nMore: {PAGES}/{page}/"
    return click.command(name, cls=cls, epilog=epilog, context_settings=settings, **more)


def run(command: click.Command, words: Sequence[str], name: str) -> int:
    """Run the command that is called `name`; its exit code. UserError: words that it does not understand."""
    try:
        with command.make_context(name, list(words)) as context:
            return command.invoke(context) or 0
    except click.exceptions.Exit as end:  # --help, --version
        return end.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else name
        text = " ".join(error.format_message().split()).removesuffix(".")
        raise UserError(f"{path}: {text}; see {path} --help") from None
