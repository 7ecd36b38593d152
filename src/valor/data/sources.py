"""Where a data set's records come from: the Hugging Face hub, a clone of its repository, or local files."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from valor.data.files import SUFFIXES, existing_file, read_records
from valor.data.recipes.recipe import Recipe, Record
from valor.errors import UserError

SPLITS = ("train", "test")
_KINDS = (*SUFFIXES, ".csv")


class Source(NamedTuple):
    """Records of one place, each with the words that name its row; the data source where the place has its own."""

    records: Iterable[tuple[str, Record]]
    data_source: str | None = None


def from_hub(recipe: Recipe, split: str, clone: Path | None = None) -> list[Source]:
    """The split's records from the hub (or its cache on this machine), or from a clone of its repository.

    Raises UserError when they are out of reach.
    """
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
                f"{path} cannot be loaded ({reason}); without a network, give the files: --local PATH …"
            ) from None
        where = f"{path} {place.split}"
        sources.append(Source(((f"{where}, row {i}", dict(row)) for i, row in enumerate(rows)), place.data_source))
    return sources


def from_local(recipe: Recipe, splits: Sequence[str], given: Sequence[str]) -> dict[str, list[Source]]:
    """The records of each split in `given`: SPLIT=FILE, a FILE of the only split, or a clone of the hub's repository.

    Raises UserError when a file's split is unknown or a split has no file.
    """
    found: dict[str, list[Source]] = {split: [] for split in splits}
    for named, path in map(split_and_path, given):
        if recipe.hub and path.is_dir():
            for split in [named] if named else splits:
                found[split] += from_hub(recipe, split, path)
            continue
        if named is None and len(splits) > 1:
            raise UserError(f"{path}: which split is it? say {' or '.join(f'{s}={path.name}' for s in splits)}")
        split = named or splits[0]
        if split in found:
            found[split].append(Source(_read(path)))
    for split in splits:
        if not found[split]:
            raise UserError(
                f"{', '.join(given)}: no file for the {split} split; give it as {split}=FILE, or take "
                f"the rest alone with --split {' '.join(one for one in splits if one != split)}"
            )
    return found


def split_and_path(given: str) -> tuple[str | None, Path]:
    """`train=FILE` as split and path; other texts are a path of no given split."""
    split, mark, path = given.partition("=")
    is_named = bool(mark) and split in SPLITS
    return split if is_named else None, Path(path if is_named else given).expanduser()


def _read(file: Path) -> Iterable[tuple[str, Record]]:
    if existing_file(file, _KINDS).suffix != ".csv":
        return read_records(file)
    try:
        with open(file, newline="", encoding="utf-8-sig") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file}: cannot be read ({type(error).__name__}: {error})") from None
    return [(f"{file}, row {i}", row) for i, row in enumerate(rows)]
