"""`valor data prepare NAME`: a public data set, or your own, as the files that runs read."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from valor.arguments import PATH, command, option
from valor.data.images import refuse_unread
from valor.data.messages import as_messages
from valor.data.recipes import (
    PREFIX,
    QUESTION,
    RECIPES,
    Example,
    Recipe,
    Record,
    conversation,
    find_recipe,
    number,
    value,
)
from valor.errors import UserError

_COLUMN_FLAGS = ("--prompt-column", "--answer-column", "--extra-columns")
_ROWS = click.IntRange(min=0)


@command("data prepare", "valor data prepare gsm8k --out data/gsm8k", "data")
@click.argument("name", required=False)
@option("--out", "--local_save_dir", "--local_dir", type=PATH, help="Folder for the files (default ~/data/NAME).")
@option(
    "--local",
    "--local_dataset_path",
    multiple=True,
    metavar="PATH…",
    help="Files (train=FILE, test=FILE), a folder with NAME_train.jsonl and NAME_test.jsonl, or a clone of the hub's "
    "repository, to read instead of the hub.",
)
@option("--split", "splits", multiple=True, type=click.Choice(("train", "test")), help="Only these splits.")
@option("--limit", type=_ROWS, metavar="N", help="N rows a split, drawn by --seed; of a generator: training rows.")
@option("--test-size", type=_ROWS, metavar="N", help="Rows of the test split, where the data has none of its own.")
@option("--seed", type=int, default=0, help="For everything that is drawn or generated.")
@option("--drop-duplicates", is_flag=True, help="Leave out repeated prompts, and train prompts that are in test.")
@option("--data-source", help="Another name, and so another grader, than the data set's own.")
@option("--template", help=f"The user's message, with {QUESTION} in it, instead of the data set's own.")
@option(
    "--as",
    "form",
    type=click.Choice(("pairs", "prompts", "sft")),
    default="pairs",
    help="What pairs become: pairs for `valor rm train`, prompts for RL, conversations for `valor sft`.",
)
@option("--option", "options", multiple=True, metavar="KEY=VALUE…", help="Settings of a generator.")
@option(
    "--prompt-column", metavar="COLUMN", help="custom: text or messages (default prompt); a dot goes into a dictionary."
)
@option("--answer-column", metavar="COLUMN", help="custom: the ground truth.")
@option("--extra-columns", multiple=True, metavar="COLUMN…", help="custom: columns that the grader needs: extra_info.")
def main(name: str | None, out: Path | None, options: Sequence[str], **flags: Any) -> int:
    """Make train.parquet and test.parquet of a data set. Without NAME: the list.

    NAME: a data set, reasoning_gym/TASK, or custom.
    """
    if name is None:
        titles = {recipe.name: recipe.title for recipe in RECIPES.values()}
        titles |= {f"{PREFIX}TASK": "puzzles of any reasoning-gym task (pip install 'valor-rl[reasoning]')"}
        titles |= {"custom": "your own jsonl, json, csv or parquet: --local FILE --answer-column A --data-source S"}
        print(
            "valor data prepare NAME, where NAME is one of\n", *(f"  {n:<19}{t}" for n, t in titles.items()), sep="\n"
        )
        return 0
    settings = dict(map(_option, options))
    prompt, answer, extra = columns = [flags.pop(flag[2:].replace("-", "_")) for flag in _COLUMN_FLAGS]
    if name != "custom" and any(columns):
        flag = next(flag for flag, column in zip(_COLUMN_FLAGS, columns, strict=True) if column)
        raise UserError(f"{flag} describes your own files: valor data prepare custom; {name} knows its columns")
    recipe = _own_prompts(prompt, answer, extra, flags["data_source"]) if name == "custom" else find_recipe(name)
    if flags["form"] != "pairs" and not recipe.pairs:
        raise UserError(f"--as {flags['form']}: {name} holds prompts; only pairs can be turned into something else")
    if flags["template"] is not None and QUESTION not in flags["template"]:
        raise UserError(f"--template must say where the question goes: {QUESTION}")
    if settings and (recipe.generate is None or flags["local"]):
        raise UserError(f"--option: {name} is read, not generated here")
    from valor.data.build import Request, prepare  # torch with it, after the mistakes in what was typed

    request = Request(recipe, options=settings, **flags)
    print("\n".join(prepare(request, out or Path("~/data") / name.replace("/", "_"))))
    return 0


def script(name: str, argv: Sequence[str] | None = None) -> int:
    """`main` for a script of its own: a mistake is one line and exit code 2."""
    try:
        return main([name, *(sys.argv[1:] if argv is None else argv)])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _own_prompts(prompt: str | None, answer: str | None, extra: Sequence[str], data_source: str | None) -> Recipe:
    """The user's questions with ground truths: names of columns, of which a dot goes into a dictionary.

    Messages stay; transcripts of `\\n\\nHuman: …` become messages; other text is the user's question. Numbers become
    text, so that csv and parquet give the same; dictionaries become JSON.
    """
    column = prompt or "prompt"
    if not answer or not data_source:
        raise UserError(
            "custom: say which column holds the right answer (--answer-column) and which grader compares with it "
            "(--data-source; valor rewards list)"
        )

    def convert(record: Record) -> Example:
        question, truth = value(record, column), value(record, answer)
        if blank := next((name for name in (column, answer) if str(value(record, name)).strip() in ("", "nan")), None):
            raise ValueError(f"has nothing in '{blank}' (empty): fill it in, or leave the row out")
        refuse_unread(record, question, "custom", "valor ppo reads the file itself, with data.image_key={column}")
        if isinstance(question, str):
            is_chat, system = question.startswith("\n\nHuman:"), record.get("system")
            question = conversation(question) if is_chat else as_messages(question.strip(), system=system)
        elif not isinstance(question, list):
            raise ValueError(f"'{column}' must be text or a list of messages, got {question!r:.60}")
        truth = json.dumps(truth, ensure_ascii=False) if isinstance(truth, Mapping) else truth
        truth = truth if isinstance(truth, list) else number(truth)
        return Example(question, truth, {name: value(record, name) for name in extra})

    return Recipe("custom", "your own questions", convert, data_source, "custom")


def _option(text: str) -> tuple[str, Any]:
    name, mark, setting = text.partition("=")
    if not mark or not name:
        raise UserError(f"--option {text}: must be KEY=VALUE")
    return name, yaml.safe_load(setting)
