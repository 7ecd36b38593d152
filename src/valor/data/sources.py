"""Where a data set's records come from: the Hugging Face hub, local files, or a generator."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from valor.data.files import SUFFIXES, existing_file, read_records
from valor.data.recipes.recipe import Recipe, Record
from valor.errors import UserError

# Columns of a file that is in training format already; see prepare.
READY = ("data_source", "prompt", "ability", "reward_model", "extra_info")

_KINDS = (*SUFFIXES, ".csv")
_WORDS = {"train": ("train",), "test": ("test", "val", "valid", "validation", "dev", "eval")}


class Source(NamedTuple):
    """Records of one place, each with the words that name its row; the data source where the place has its own."""

    records: Iterable[tuple[str, Record]]
    data_source: str | None = None


def from_hub(recipe: Recipe, split: str) -> list[Source]:
    """The split's records from the hub, or from its cache on this machine. Raises UserError when it is out of reach."""
    from datasets import load_dataset
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity_error()  # without a network it would announce each of its retries
    sources = []
    for place in recipe.hub[split]:
        try:
            rows = load_dataset(place.path, place.config, split=place.split)
        except Exception as error:  # whatever network, proxy, cache and hub errors there are
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise UserError(
                f"{place.path} cannot be loaded ({reason}); without a network, give the files: --local PATH …"
            ) from None
        wanted = [name for name in rows.column_names if not recipe.columns or name in (*recipe.columns, *READY)]
        rows = rows.select_columns(wanted)
        where = f"{place.path} {place.split}"
        sources.append(Source(((f"{where}, row {i}", dict(row)) for i, row in enumerate(rows)), place.data_source))
    return sources


def from_files(recipe: Recipe, split: str, files: Sequence[Path]) -> list[Source]:
    """The records of these files. A file whose name holds one of the recipe's places has that place's data source."""
    columns = (*recipe.columns, *READY) if recipe.columns else None
    return [Source(_read(file, columns), _own_data_source(recipe, split, file)) for file in files]


def named_splits(given: Sequence[str]) -> tuple[str, ...]:
    """The splits that these files name, as SPLIT=FILE or in the file's own name; train when none of them does."""
    named = {split or _split_in_name(path) for split, path in map(_split_and_path, given)}
    if named <= {None}:
        return ("train",)
    return tuple(split for split in _WORDS if split in named or None in named)


def local_files(recipe: Recipe, splits: Sequence[str], given: Sequence[str]) -> dict[str, list[Path]]:
    """Which of the given files and folders hold which split.

    `train=FILE` names its split. Another file belongs to the only split asked for, or to the one in its name; in a
    folder, the file is looked for under the names that it has on the hub and under NAME_SPLIT, SPLIT. Raises UserError
    when a file's split is unknown or a split has no file.
    """
    found: dict[str, list[Path]] = {split: [] for split in splits}
    for named, path in map(_split_and_path, given):
        if named:
            found.setdefault(named, []).append(path)
        elif path.is_dir():
            for split in splits:
                found[split] += _in_folder(recipe, split, path)
        else:
            found[_split_of(path, splits)].append(path)
    for split in splits:
        if not found[split]:
            raise UserError(
                f"{', '.join(given)}: no file for the {split} split; give it as {split}=FILE, or leave the split out "
                "with --split"
            )
    return {split: found[split] for split in splits}


def _split_and_path(given: str) -> tuple[str | None, Path]:
    """`train=FILE` as split and path; other texts are a path of no given split."""
    split, mark, path = given.partition("=")
    is_given = bool(mark) and split in _WORDS
    return split if is_given else None, Path(path if is_given else given).expanduser()


def _split_of(file: Path, splits: Sequence[str]) -> str:
    split = splits[0] if len(splits) == 1 else _split_in_name(file)
    if split not in splits:
        raise UserError(f"{file}: which split is it? say {' or '.join(f'{s}={file.name}' for s in splits)}")
    return str(split)


def _split_in_name(file: Path) -> str | None:
    """The split in the file's name; None when it holds none or both."""
    words = set(re.split(r"[^a-z]+", file.name.lower()))
    named = [split for split, names in _WORDS.items() if words & set(names)]
    return named[0] if len(named) == 1 else None


def _in_folder(recipe: Recipe, split: str, folder: Path) -> list[Path]:
    found: list[Path] = []
    for place in recipe.hub.get(split, ()):
        prefix = f"{place.config}/" if place.config else "data/"
        patterns = (f"{prefix}{place.split}-*.parquet", f"{place.split}-*.parquet", f"{prefix}{place.split}.jsonl")
        found += next((shards for pattern in patterns if (shards := sorted(folder.glob(pattern)))), [])
    if found:
        return found
    stems = [f"{recipe.name}_{split}", split, *([recipe.name] if len(recipe.splits) == 1 else [])]
    candidates = [folder / f"{stem}{suffix}" for stem in stems for suffix in _KINDS]
    return [file for file in candidates if file.is_file()][:1]


def _own_data_source(recipe: Recipe, split: str, file: Path) -> str | None:
    """Of a recipe with several places, the one that is a word of the file's name or its folder's: `nq/train.jsonl`."""
    words = re.split(r"[^a-z0-9]+", f"{file.parent.name}/{file.name}".lower())
    for place in recipe.hub.get(split, ()):
        if place.data_source and place.data_source.rpartition("_")[2] in words:
            return place.data_source
    return None


def _read(file: Path, columns: Sequence[str] | None) -> Iterable[tuple[str, Record]]:
    if existing_file(file, _KINDS).suffix != ".csv":
        return read_records(file, (), columns)
    try:
        with open(file, newline="", encoding="utf-8-sig") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file}: cannot be read ({type(error).__name__}: {error})") from None
    return [(f"{file}, row {i}", row) for i, row in enumerate(rows)]
