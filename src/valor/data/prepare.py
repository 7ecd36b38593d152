"""`valor data prepare NAME`: a public data set, or your own, as the files that runs read."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from valor.data.build import Request, prepare
from valor.data.files import Messages
from valor.data.recipes import RECIPES, find_recipe
from valor.data.recipes.convert import conversation
from valor.data.recipes.gym import PREFIX
from valor.data.recipes.recipe import QUESTION, Example, Recipe, Record, number, value
from valor.errors import UserError

_COLUMN_FLAGS = {
    "--prompt-column": "text or messages (default prompt)",
    "--answer-column": "the ground truth",
    "--extra-columns": "columns that the grader needs: extra_info",
}


def main(argv: list[str]) -> int:
    """`valor data prepare`. Exit code 0; a mistake is a UserError."""
    args = _parser().parse_args(argv)
    if args.name is None:
        print(_catalogue())
        return 0
    recipe = _recipe(args)
    args.options = dict(args.options)
    request = Request(recipe, **{one.name: getattr(args, one.name) for one in fields(Request) if one.name != "recipe"})
    out = args.out or Path("~/data") / args.name.replace("/", "_")
    print("\n".join(prepare(request, out)))
    return 0


def script(name: str, argv: Sequence[str] | None = None) -> int:
    """`main` for a script of its own: a mistake is one line and exit code 2."""
    try:
        return main([name, *(sys.argv[1:] if argv is None else argv)])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _recipe(args: argparse.Namespace) -> Recipe:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="valor data prepare",
        description="Make train.parquet and test.parquet of a data set. Without NAME: the list.",
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="a data set, reasoning_gym/TASK, or custom")
    add("--out", "--local_save_dir", "--local_dir", type=Path, help="folder for the files (default ~/data/NAME)")
    add(
        "--local",
        "--local_dataset_path",
        nargs="+",
        default=[],
        metavar="PATH",
        help="files (train=FILE, test=FILE) or a clone of the hub's repository, to read instead of the hub",
    )
    only = {"nargs": "+", "action": "extend", "default": [], "choices": ("train", "test")}
    add("--split", dest="splits", **only, help="only these splits")
    add("--limit", type=_rows, metavar="N", help="N rows a split, drawn by --seed; of a generator: training rows")
    add("--test-size", type=_rows, metavar="N", help="rows of the test split, where the data has none of its own")
    add("--seed", type=int, default=0, help="for everything that is drawn or generated (default 0)")
    add("--drop-duplicates", action="store_true", help="leave out repeated prompts, and train prompts that are in test")
    add("--data-source", help="another name, and so another grader, than the data set's own")
    add("--template", help=f"the user's message, with {QUESTION} in it, instead of the data set's own")
    add("--system", help="a system message before every prompt that has none")
    add(
        "--as",
        dest="form",
        choices=("pairs", "prompts", "sft"),
        default="pairs",
        help="what pairs become: pairs for `valor rm train`, prompts for RL, conversations for `valor sft`",
    )
    settings = {"dest": "options", "type": _option, "nargs": "+", "action": "extend", "default": []}
    add("--option", **settings, metavar="KEY=VALUE", help="settings of a generator")
    own = parser.add_argument_group("custom: which column of your files is what (a dot goes into a dictionary)")
    for flag, text in _COLUMN_FLAGS.items():
        several = {"nargs": "+", "default": []} if flag == "--extra-columns" else {}
        own.add_argument(flag, metavar="NAME", help=text, **several)
    return parser


def _rows(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of rows, got {text}")
    return int(text)
