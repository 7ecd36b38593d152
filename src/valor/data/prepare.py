"""`valor data prepare NAME`: a public data set, or your own, as the files that runs read."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from valor.arguments import PATH, command, option
from valor.data.messages import Messages
from valor.data.recipes.catalogue import PREFIX, RECIPES, find_recipe
from valor.data.recipes.records import QUESTION, Example, Recipe, Record, conversation, number, value
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
@option("--system", help="A system message before every prompt that has none.")
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
def main(name: str | None, out: Path | None, **asked: Any) -> int:
    """Make train.parquet and test.parquet of a data set. Without NAME: the list.

    NAME: a data set, reasoning_gym/TASK, or custom.
    """
    if name is None:
        print(_catalogue())
        return 0
    args = SimpleNamespace(name=name, **asked)
    args.options = dict(map(_option, args.options))
    recipe = _recipe(args)
    from valor.data.build import Request, prepare  # torch with it, after the mistakes in what was typed

    request = Request(recipe, **{one.name: getattr(args, one.name) for one in fields(Request) if one.name != "recipe"})
    print("\n".join(prepare(request, out or Path("~/data") / name.replace("/", "_"))))
    return 0


def script(name: str, argv: Sequence[str] | None = None) -> int:
    """`main` for a script of its own: a mistake is one line and exit code 2."""
    try:
        return main([name, *(sys.argv[1:] if argv is None else argv)])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _recipe(args: SimpleNamespace) -> Recipe:
    """The recipe that is asked for. UserError for flags that do not go with it."""
    given = [flag for flag in _COLUMN_FLAGS if getattr(args, flag[2:].replace("-", "_"))]
    if args.name == "custom":
        if not args.answer_column or not args.data_source:
            raise UserError(
                "custom: say which column holds the right answer (--answer-column) and which grader compares with it "
                "(--data-source; valor rewards list)"
            )
        recipe = _own_prompts(args.prompt_column or "prompt", args.answer_column, args.data_source, args.extra_columns)
    elif given:
        raise UserError(
            f"{given[0]} describes your own files: valor data prepare custom; {args.name} knows its columns"
        )
    else:
        recipe = find_recipe(args.name)
    if args.form != "pairs" and not recipe.pairs:
        raise UserError(f"--as {args.form}: {recipe.name} holds prompts; only pairs can be turned into something else")
    if args.template is not None and QUESTION not in args.template:
        raise UserError(f"--template must say where the question goes: {QUESTION}")
    if args.options and (recipe.generate is None or args.local):
        raise UserError(f"--option: {recipe.name} is read, not generated here")
    return recipe


def _own_prompts(prompt: str, answer: str, data_source: str, extra: Sequence[str]) -> Recipe:
    """Your own questions with ground truths. `prompt` names text or messages, `answer` what the grader compares with.

    A dot in a name goes into a dictionary: `reward_model.ground_truth`.
    """

    def convert(record: Record) -> Example:
        others = {name: value(record, name) for name in extra}
        return Example(_text_or_messages(record, prompt), _truth(value(record, answer)), others)

    return Recipe("custom", "your own questions", convert, data_source, "custom")


def _text_or_messages(record: Record, name: str) -> str | Messages:
    """Messages stay; transcripts of `\\n\\nHuman: …` become messages; other text is the user's question."""
    found = value(record, name)
    if isinstance(found, list):
        return found
    if not isinstance(found, str):
        raise ValueError(f"'{name}' must be text or a list of messages, got {found!r:.60}")
    return conversation(found) if found.startswith("\n\nHuman:") else found.strip()


def _truth(found: Any) -> Any:
    """Numbers as text, so that csv and parquet give the same; lists and texts as they are."""
    if isinstance(found, Mapping):
        return json.dumps(found, ensure_ascii=False)
    return found if isinstance(found, list) else number(found)


def _option(text: str) -> tuple[str, Any]:
    name, mark, setting = text.partition("=")
    if not mark or not name:
        raise UserError(f"--option {text}: must be KEY=VALUE")
    try:
        return name, json.loads(setting)
    except json.JSONDecodeError:
        return name, setting


def _catalogue() -> str:
    lines = [f"  {name:<14}{recipe.title}" for name, recipe in RECIPES.items()]
    lines += [f"  {PREFIX}TASK  puzzles of any reasoning-gym task (pip install 'valor-rl[reasoning]')"]
    lines += ["  custom        your own jsonl, json, csv or parquet: --local FILE --answer-column A --data-source S"]
    return "\n".join(["valor data prepare NAME, where NAME is one of", "", *lines])
