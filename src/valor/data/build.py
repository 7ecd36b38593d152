"""Makes the files of a data set from its records, which are all read and checked before a file is written.

Records come from the Hugging Face hub, a clone of its repository, local files, or a generator.
"""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from valor.data.files import SUFFIXES, existing_file, parse_row, read_records, same_text, write_parquet
from valor.data.messages import Messages
from valor.data.recipes.records import QUESTION, Pair, Recipe, Record
from valor.data.sampler import subset
from valor.errors import UserError
from valor.hub import hub_answers

Row = dict[str, Any]

SPLITS = ("train", "test")
_KINDS = (*SUFFIXES, ".csv")
_HOLD_OUT_STREAM, _LIMIT_STREAM = 3, 4  # second words of random keys
_NUM_TRAIN, _NUM_TEST = 10_000, 500  # puzzles, unless other numbers are asked for
_PATIENCE = 1000  # puzzles in a row that were there already, before a generator counts as exhausted


class Source(NamedTuple):
    """Records of one place, each with the words that name its row; the data source where the place has its own."""

    records: Iterable[tuple[str, Record]]
    data_source: str | None = None


@dataclass(frozen=True)
class Request:
    """What is to be made of a recipe.

    `local`: files and folders instead of the hub. `splits` empty: all that it has. `limit`: rows a split, drawn by
    `seed`; of a generator, training rows to make. `test_size`: rows of a test split that is held out of train, for data
    that has none. `template` takes the place of the recipe's, in ready-made messages too. `system`: a message before
    prompts that have none. `form` turns pairs into RL `prompts` or `sft` conversations. `options` are a generator's
    settings. `data_source`: another one than the data's own.
    """

    recipe: Recipe
    local: Sequence[str] = ()
    splits: Sequence[str] = ()
    limit: int | None = None
    test_size: int | None = None
    seed: int = 0
    template: str | None = None
    system: str | None = None
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
        splits = _read(request, notes)
        splits = _held_out(request, splits)
        if request.limit == 0:
            raise UserError("--limit 0 leaves no rows to write")
        if request.limit is not None:
            for split, rows in splits.items():
                splits[split] = [rows[i] for i in subset(len(rows), request.limit, request.seed, _LIMIT_STREAM)]
    files = {out.expanduser() / f"{split}.parquet": _finished(rows, split, request) for split, rows in splits.items()}
    write_parquet(files)
    return [*(f"{path}: {len(rows)} rows" for path, rows in files.items()), *notes]


def _sources(request: Request) -> dict[str, list[Source]]:
    recipe = request.recipe
    named = {split for split, _ in map(split_and_path, request.local)}
    splits = tuple(request.splits) or tuple(recipe.hub) or tuple(s for s in SPLITS if s in named) or SPLITS[:1]
    if recipe.hub and (unknown := [split for split in splits if split not in recipe.hub]):
        raise UserError(f"{recipe.name} has no {unknown[0]} split; it has {', '.join(recipe.hub)}")
    if request.local:
        return from_local(recipe, splits, request.local)
    if not recipe.hub:
        raise UserError(f"{recipe.name} reads your own files: give them with --local PATH …")
    return {split: from_hub(recipe, split) for split in splits}


def _read(request: Request, notes: list[str]) -> dict[str, list[Row]]:
    sources = _sources(request)
    drop = request.drop_duplicates or request.recipe.one_each
    splits: dict[str, list[Row]] = {}
    for split in sorted(sources):  # test before train, so that train can be compared with it
        rows = (row for source in sources[split] for row in _rows(request, split, source, notes))
        in_test = {_identity(row) for row in splits.get("test", ())}
        splits[split] = list(_without_duplicates(rows, split, in_test, drop, notes))
    return {split: splits[split] for split in sources}


def _without_duplicates(
    rows: Iterable[Row], split: str, in_test: set[str], drop: bool, notes: list[str]
) -> Iterable[Row]:
    """Note how many prompts occur again, and how many are in test as well; with `drop`, leave both out."""
    seen: set[str] = set()
    repeated = leaked = 0
    for row in rows:
        key = _identity(row)
        repeated, leaked = repeated + (key in seen), leaked + (key in in_test)
        if not drop or (key not in seen and key not in in_test):
            yield row
        seen.add(key)
    done = "left out" if drop else "kept (--drop-duplicates leaves them out)"
    notes += [f"{split}: {repeated} rows repeat another row's prompt, {done}"] if repeated else []
    notes += [f"{split}: {leaked} rows have a prompt that is in test, {done}"] if leaked else []


def _rows(request: Request, split: str, source: Source, notes: list[str]) -> Iterable[Row]:
    recipe, left_out = request.recipe, 0
    for where, record in source.records:
        try:
            row = _row(request, record, source.data_source)
            if row is not None and not recipe.pairs:
                parse_row(row, where)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{where}: {error}") from None
        if row is None:
            left_out += 1
        else:
            yield row
    if left_out:
        notes.append(f"{split}: {left_out} records without a usable answer were left out")


def _row(request: Request, record: Record, place: str | None = None) -> Row | None:
    """The row that a record makes; `place` is the data source of the place where it was found."""
    recipe = request.recipe
    made = recipe.convert(record)
    if made is None:
        return None
    if isinstance(made, Pair):
        return {**made._asdict(), "prompt": _messages(request, made.prompt)}
    source, truth = request.data_source or made.data_source or place or recipe.data_source, made.ground_truth
    extra = dict(made.extra)
    if recipe.tool:
        asked = {"ground_truth": truth, "question": extra.get("question"), "data_source": source}
        extra |= {"need_tools_kwargs": True, "tools_kwargs": {recipe.tool: {"create_kwargs": asked}}}
    return {
        "data_source": source,
        "prompt": _messages(request, made.question),
        "ability": recipe.ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra,
    }


def _messages(request: Request, question: str | Messages) -> list[Row]:
    if isinstance(question, str):
        template = request.recipe.template if request.template is None else request.template
        messages = [{"role": "user", "content": template.replace(QUESTION, question)}]
    else:
        messages = [{key: found for key, found in message.items() if found is not None} for message in question]
        last = messages[-1] if messages else {}
        if request.template is not None and last.get("role") == "user":
            last["content"] = request.template.replace(QUESTION, str(last["content"]))
    has_system = bool(messages) and messages[0].get("role") == "system"
    return messages if has_system or not request.system else [{"role": "system", "content": request.system}, *messages]


def _generated(request: Request, notes: list[str]) -> dict[str, list[Row]]:
    """Distinct puzzles: the first ones are the test set, so that it stays the same whatever the number of others."""
    recipe = request.recipe
    assert recipe.generate is not None
    num_test = _NUM_TEST if request.test_size is None else request.test_size
    num_train = _NUM_TRAIN if request.limit is None else request.limit
    found: dict[str, Row] = {}
    repeats = 0
    try:
        for record in recipe.generate(request.seed, **request.options):
            row, known = _row(request, record), len(found)
            assert row is not None, "a generator makes no puzzle without an answer"
            found.setdefault(same_text(row["prompt"]), row)
            repeats = repeats + 1 if len(found) == known else 0
            if len(found) >= num_test + num_train or repeats > _PATIENCE:
                break
    except (TypeError, ValueError) as error:
        raise UserError(f"{recipe.name}: {error}") from None
    rows = list(found.values())
    if len(rows) < num_test + num_train:
        notes.append(f"there are only {len(rows)} different ones")
    made = {"train": rows[num_test:]} if num_train else {}
    made |= {"test": rows[:num_test]} if num_test else {}
    return {split: made.get(split, []) for split in request.splits or made}


def _held_out(request: Request, splits: dict[str, list[Row]]) -> dict[str, list[Row]]:
    if not request.test_size:
        return splits
    if "test" in splits or "train" not in splits:
        raise UserError("--test-size holds rows of train out for a test split; here there is one already (use --limit)")
    rows = splits["train"]
    if request.test_size >= len(rows):
        raise UserError(f"--test-size {request.test_size} leaves none of {len(rows)} rows to train on")
    test = subset(len(rows), request.test_size, request.seed, _HOLD_OUT_STREAM)
    return {"train": [rows[i] for i in sorted({*range(len(rows))} - {*test})], "test": [rows[i] for i in test]}


def _identity(row: Row) -> str:
    return same_text(row["prompt"]) + "\n".join((row["chosen"], row["rejected"]) if "chosen" in row else ())


def _finished(rows: list[Row], split: str, request: Request) -> list[Row]:
    recipe = request.recipe
    if not recipe.pairs:
        return [{**row, "extra_info": {"split": split, "index": i, **row["extra_info"]}} for i, row in enumerate(rows)]
    if request.form == "sft":
        return [{"messages": [*row["prompt"], {"role": "assistant", "content": row["chosen"]}]} for row in rows]
    if request.form == "prompts":
        return [
            {
                "data_source": request.data_source or recipe.data_source,
                "prompt": row["prompt"],
                "ability": recipe.ability,
                "reward_model": {"style": "model", "ground_truth": row["chosen"]},
                "extra_info": {"split": split, "index": i},
            }
            for i, row in enumerate(rows)
        ]
    return rows


def from_hub(recipe: Recipe, split: str, clone: Path | None = None) -> list[Source]:
    """The split's records from the hub (or its cache on this machine), or from a clone of its repository.

    Raises UserError when they are out of reach.
    """
    if clone is None:
        hub_answers()  # before `datasets` asks whether it is offline
    from datasets import load_dataset
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity_error()  # without a network it would announce each of its retries
    sources = []
    for place in recipe.hub[split]:
        path = place.path if clone is None else str(clone)
        try:
            rows = load_dataset(path, place.config, split=place.split)
        except Exception as error:  # whatever network, proxy, cache and hub errors there are
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise UserError(
                f"{path} cannot be loaded ({reason}); without a network, give the files: --local PATH (the same as "
                f"--local_dataset_path), {split}=FILE or a folder with {recipe.name}_{split}.jsonl"
            ) from None
        where = f"{path} {place.split}"
        sources.append(Source(((f"{where}, row {i}", dict(row)) for i, row in enumerate(rows)), place.data_source))
    return sources


def from_local(recipe: Recipe, splits: Sequence[str], given: Sequence[str]) -> dict[str, list[Source]]:
    """The records of each split in `given`: SPLIT=FILE, a FILE of the only split, a folder with NAME_SPLIT.jsonl (or
    another kind of file, with or without NAME), or a clone of the hub's repository.

    Raises UserError when a file's split is unknown or a split has no file.
    """
    found: dict[str, list[Source]] = {split: [] for split in splits}
    for named, path in map(split_and_path, given):
        if path.is_dir():
            files = {split: _files_of(recipe, split, path) for split in ([named] if named else splits)}
            for split, inside in files.items():
                found[split] += [Source(_file_records(file)) for file in inside]
                found[split] += [] if any(files.values()) or not recipe.hub else from_hub(recipe, split, path)
            continue
        if named is None and len(splits) > 1:
            raise UserError(f"{path}: which split is it? say {' or '.join(f'{s}={path.name}' for s in splits)}")
        split = named or splits[0]
        if split in found:
            found[split].append(Source(_file_records(path)))
    for split in splits:
        if not found[split]:
            rest = " ".join(one for one in splits if found[one])
            alone = f", or take the rest alone with --split {rest}" if rest else ""
            raise UserError(f"{', '.join(given)}: no file for the {split} split; give it as {split}=FILE{alone}")
    return found


def _files_of(recipe: Recipe, split: str, folder: Path) -> list[Path]:
    """The files of a folder that are named after the split, or after a recipe of one split."""
    name, kinds = re.escape(recipe.name), "|".join(map(re.escape, _KINDS))
    stem = rf"({name}[-_.])?{split}(-\d+-of-\d+)?" + (f"|{name}" if len(recipe.hub) == 1 else "")
    return sorted(file for file in folder.iterdir() if re.fullmatch(f"({stem})({kinds})", file.name))


def split_and_path(given: str) -> tuple[str | None, Path]:
    """`train=FILE` as split and path; other texts are a path of no given split."""
    split, mark, path = given.partition("=")
    is_named = bool(mark) and split in SPLITS
    return split if is_named else None, Path(path if is_named else given).expanduser()


def _file_records(file: Path) -> Iterable[tuple[str, Record]]:
    if existing_file(file, _KINDS).suffix != ".csv":
        return read_records(file)
    try:
        with open(file, newline="", encoding="utf-8-sig") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file}: cannot be read ({type(error).__name__}: {error})") from None
    return [(f"{file}, row {i}", row) for i, row in enumerate(rows)]
