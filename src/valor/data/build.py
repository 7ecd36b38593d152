"""Makes the files of a data set from its records, which are all read and checked before a file is written.

Records come from the Hugging Face hub, a clone of its repository, local files, or a generator.
"""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from valor.data.files import SUFFIXES, existing_file, parse_row, read_records, same_text, unreadable, write_parquet
from valor.data.messages import Messages
from valor.data.recipes import QUESTION, Pair, Recipe, Record
from valor.data.sampler import subset
from valor.errors import UserError
from valor.hub import hub_answers
from valor.user_files import installed

Row = dict[str, Any]
Records = list[tuple[str, Record]]  # each with its file and line for error messages

SPLITS = ("train", "test")
_KINDS = (*SUFFIXES, ".csv")
_HOLD_OUT_STREAM, _LIMIT_STREAM = 3, 4  # second words of random keys
_NUM_TRAIN, _NUM_TEST = 10_000, 500  # puzzles, by default
_PATIENCE = 1000  # repeated puzzles in a row after which a generator counts as exhausted


@dataclass(frozen=True)
class Request:
    """What is to be made of a recipe.

    `local`: files and folders instead of the hub. `splits` empty: all that it has. `limit`: rows a split, drawn by
    `seed`; of a generator, training rows to make. `test_size`: rows of a test split that is held out of train, for data
    that has none. `template` replaces the recipe's, in ready-made messages too. `form` turns pairs into RL `prompts` or
    `sft` conversations. `options` are a generator's settings. `data_source` replaces the data's own.
    """

    recipe: Recipe
    local: Sequence[str] = ()
    splits: Sequence[str] = ()
    limit: int | None = None
    test_size: int | None = None
    seed: int = 0
    template: str | None = None
    form: str = "pairs"
    drop_duplicates: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    data_source: str | None = None


def prepare(request: Request, out: Path) -> list[str]:
    """Write `out`/SPLIT.parquet for every split, once all records are read. Returns lines that say what was done."""
    notes: list[str] = []
    if request.recipe.generate is not None and not request.local:
        splits = _generated(request, notes)
    else:
        records, splits = _sources(request), {}
        for split in sorted(records):  # test before train, so that train can be compared with it
            splits[split] = _rows(request, split, records[split], splits.get("test", ()), notes)
        splits = _held_out(request, {split: splits[split] for split in records}, notes)
        if request.limit == 0:
            raise UserError("--limit 0 leaves no rows to write")
        for split, rows in splits.items():
            drawn = subset(len(rows), request.limit or 0, request.seed, _LIMIT_STREAM)
            splits[split] = [rows[i] for i in drawn]
    files = {out.expanduser() / f"{split}.parquet": _finished(rows, split, request) for split, rows in splits.items()}
    write_parquet(files)
    return [*(f"{path}: {len(rows)} rows" for path, rows in files.items()), *notes]


def _sources(request: Request) -> dict[str, Records]:
    recipe, local = request.recipe, [_split_and_path(text) for text in request.local]
    named = {split for split, _ in local}
    splits = tuple(request.splits) or tuple(recipe.hub) or tuple(s for s in SPLITS if s in named) or SPLITS[:1]
    if recipe.hub and (unknown := [split for split in splits if split not in recipe.hub]):
        raise UserError(f"{recipe.name} has no {unknown[0]} split; it has {', '.join(recipe.hub)}")
    if local:
        return _from_local(recipe, splits, local)
    if not recipe.hub:
        raise UserError(f"{recipe.name} reads your own files: give them with --local PATH …")
    return {split: _from_hub(recipe, split) for split in splits}


def _rows(request: Request, split: str, records: Records, test: Iterable[Row], notes: list[str]) -> list[Row]:
    """The split's rows; notes say how many records were unusable, repeated, or are in `test` as well."""
    recipe, rows, seen, in_test = request.recipe, [], set[str](), {_identity(row) for row in test}
    drop = request.drop_duplicates or recipe.one_each
    unusable = repeated = leaked = 0
    for where, record in records:
        try:
            row = _row(request, record)
            if row is not None and not recipe.pairs:
                parse_row(row, where)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{where}: {error}") from None
        if row is None:
            unusable += 1
            continue
        identity = _identity(row)
        repeated, leaked = repeated + (identity in seen), leaked + (identity in in_test)
        if not drop or identity not in seen | in_test:
            rows.append(row)
        seen.add(identity)
    done = "left out" if drop else "kept (--drop-duplicates leaves them out)"
    counts = {
        f"{unusable} records without a usable answer were left out": unusable,
        f"{repeated} rows repeat another row's prompt, {done}": repeated,
        f"{leaked} rows have a prompt that is in test, {done}": leaked,
    }
    notes += [f"{split}: {note}" for note, count in counts.items() if count]
    return rows


def _row(request: Request, record: Record) -> Row | None:
    recipe = request.recipe
    example = recipe.convert(record)
    if example is None:
        return None
    if isinstance(example, Pair):
        return {**example._asdict(), "prompt": _messages(request, example.prompt)}
    source, truth, extra = request.data_source or example.data_source or recipe.data_source, example.ground_truth, {}
    if recipe.tool:
        call = {"ground_truth": truth, "question": example.extra.get("question"), "data_source": source}
        extra = {"need_tools_kwargs": True, "tools_kwargs": {recipe.tool: {"create_kwargs": call}}}
    return {
        "data_source": source,
        "prompt": _messages(request, example.question),
        "ability": recipe.ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {**example.extra, **extra},
    }


def _messages(request: Request, question: str | Messages) -> list[Row]:
    if isinstance(question, str):
        template = request.recipe.template if request.template is None else request.template
        return [{"role": "user", "content": template.replace(QUESTION, question)}]
    messages = [{key: entry for key, entry in message.items() if entry is not None} for message in question]
    if request.template is not None and messages and messages[-1].get("role") == "user":
        messages[-1]["content"] = request.template.replace(QUESTION, str(messages[-1]["content"]))
    return messages


def _generated(request: Request, notes: list[str]) -> dict[str, list[Row]]:
    """Distinct puzzles: the first ones are the test set, so that it stays the same whatever the number of others."""
    recipe = request.recipe
    assert recipe.generate is not None
    num_test = _NUM_TEST if request.test_size is None else request.test_size
    num_train = _NUM_TRAIN if request.limit is None else request.limit
    by_text: dict[str, Row] = {}
    repeats = 0
    try:
        for record in recipe.generate(request.seed, **request.options):
            row, before = _row(request, record), len(by_text)
            assert row is not None, "a generator makes no puzzle without an answer"
            by_text.setdefault(same_text(row["prompt"]), row)
            repeats = repeats + 1 if len(by_text) == before else 0
            if len(by_text) >= num_test + num_train or repeats > _PATIENCE:
                break
    except (TypeError, ValueError) as error:
        raise UserError(f"{recipe.name}: {error}") from None
    rows = list(by_text.values())
    if len(rows) < num_test + num_train:
        notes.append(f"there are only {len(rows)} different ones")
    splits = {"train": rows[num_test:]} if num_train else {}
    splits |= {"test": rows[:num_test]} if num_test else {}
    return {split: splits.get(split, []) for split in request.splits or splits}


def _held_out(request: Request, splits: dict[str, list[Row]], notes: list[str]) -> dict[str, list[Row]]:
    """A test split of rows of train; train keeps none that repeats one of them."""
    if not request.test_size:
        return splits
    if "test" in splits or "train" not in splits:
        raise UserError("--test-size holds rows of train out for a test split; here there is one already (use --limit)")
    rows = splits["train"]
    if request.test_size >= len(rows):
        raise UserError(f"--test-size {request.test_size} leaves none of {len(rows)} rows to train on")
    test = subset(len(rows), request.test_size, request.seed, _HOLD_OUT_STREAM)
    in_test, rest = {_identity(rows[i]) for i in test}, [rows[i] for i in sorted({*range(len(rows))} - {*test})]
    train = [row for row in rest if _identity(row) not in in_test]
    if not train:
        raise UserError(f"--test-size {request.test_size}: every row left repeats one of test: set it lower")
    if len(train) < len(rest):
        notes.append(f"train: {len(rest) - len(train)} rows that repeat a prompt of test were left out")
    return {"train": train, "test": [rows[i] for i in test]}


def _identity(row: Row) -> str:
    return same_text(row["prompt"]) + "\n".join((row["chosen"], row["rejected"]) if "chosen" in row else ())


def _finished(rows: list[Row], split: str, request: Request) -> list[Row]:
    recipe = request.recipe
    if recipe.pairs and request.form == "pairs":
        return rows
    if recipe.pairs and request.form == "sft":
        return [{"messages": [*row["prompt"], {"role": "assistant", "content": row["chosen"]}]} for row in rows]
    if recipe.pairs:
        common = {"data_source": request.data_source or recipe.data_source, "ability": recipe.ability, "extra_info": {}}
        truths = [{"style": "model", "ground_truth": row["chosen"]} for row in rows]
        rows = [{**common, "prompt": row["prompt"], "reward_model": t} for row, t in zip(rows, truths, strict=True)]
    return [{**row, "extra_info": {"split": split, "index": i, **row["extra_info"]}} for i, row in enumerate(rows)]


def _from_hub(recipe: Recipe, split: str, clone: Path | None = None) -> Records:
    """The split's records from the hub (or its cache on this machine), or from a clone of its repository."""
    if clone is None:
        hub_answers()  # before `datasets` asks whether it is offline
    load_dataset = installed("datasets", "a data set of the hub is read by datasets", "datasets").load_dataset
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity_error()  # without a network it would announce each of its retries
    records: Records = []
    for hub in recipe.hub[split]:
        path = hub.path if clone is None else str(clone)
        try:
            rows = load_dataset(path, hub.config, split=hub.split)
        except Exception as error:  # whatever network, proxy, cache and hub errors there are
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise UserError(
                f"{path} cannot be loaded ({reason}); without a network, give the files: --local PATH (the same as "
                f"--local_dataset_path), {split}=FILE or a folder with {recipe.name}_{split}.jsonl"
            ) from None
        source = {"data_source": hub.data_source} if hub.data_source else {}
        records += [(f"{path} {hub.split}, row {i}", dict(row) | source) for i, row in enumerate(rows)]
    return records


def _from_local(recipe: Recipe, splits: Sequence[str], local: list[tuple[str | None, Path]]) -> dict[str, Records]:
    """The records of each split: of SPLIT=FILE, a FILE of the only split, a folder with NAME_SPLIT.jsonl (or another
    kind of file, with or without NAME), or a clone of the hub's repository. UserError: a split has no file, or a file
    no split."""
    records: dict[str, Records] = {split: [] for split in splits}
    for split, path in local:
        if path.is_dir():
            files = {name: _files_of(recipe, name, path) for name in ([split] if split else splits)}
            for name, inside in files.items():
                records[name] += [record for file in inside for record in _file_records(file)]
                records[name] += [] if any(files.values()) or not recipe.hub else _from_hub(recipe, name, path)
        elif split is None and len(splits) > 1:
            raise UserError(f"{path}: which split is it? say {' or '.join(f'{s}={path.name}' for s in splits)}")
        elif (split or splits[0]) in records:
            records[split or splits[0]] += _file_records(path)
    for split in splits:
        if not records[split]:
            rest = " ".join(other for other in splits if records[other])
            alone = f", or take the rest alone with --split {rest}" if rest else ""
            raise UserError(f"--local: no file for the {split} split; give it as {split}=FILE{alone}")
    return records


def _files_of(recipe: Recipe, split: str, folder: Path) -> list[Path]:
    """The files of a folder that are named after the split, or after a recipe of one split."""
    name, kinds = re.escape(recipe.name), "|".join(map(re.escape, _KINDS))
    stem = rf"({name}[-_.])?{split}(-\d+-of-\d+)?" + (f"|{name}" if len(recipe.hub) == 1 else "")
    return sorted(file for file in folder.iterdir() if re.fullmatch(f"({stem})({kinds})", file.name))


def _split_and_path(text: str) -> tuple[str | None, Path]:
    """`train=FILE` as split and path; other texts are a path without a split."""
    split, mark, path = text.partition("=")
    return (split, Path(path).expanduser()) if mark and split in SPLITS else (None, Path(text).expanduser())


def _file_records(file: Path) -> Records:
    if existing_file(file, _KINDS).suffix != ".csv":
        return list(read_records(file))
    try:
        with open(file, newline="", encoding="utf-8-sig") as stream:
            records: Records = [(f"{file}, row {i}", row) for i, row in enumerate(csv.DictReader(stream))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise unreadable(file, error) from None
    if not records:
        raise UserError(f"{file}: the file holds no rows")
    if where := next((where for where, row in records if None in row), None):
        raise UserError(f"{where}: has more cells than the first line has names: put those with commas into quotes")
    return records
