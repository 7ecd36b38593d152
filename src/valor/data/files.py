"""Prompt files: parquet, jsonl and json in the columns that verl made common, read into checked rows.

A row has `prompt` (a list of messages, each with `role` and `content`), `data_source` (which grader scores it),
`reward_model` ({"style": "rule", "ground_truth": ...}), and optionally `ability`, `extra_info`, `agent_name` (which
loop plays its episodes; it is kept in `extra_info`), `tools`, `enable_thinking` and `chat_template_kwargs` (for
the template).
Files of questions and answers (`valor.data.plain_rows`) are read too.
"""

import gzip
import json
import math
import os
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from shlex import quote
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from valor.config import DataConfig
from valor.data.images import PLACEHOLDER, Source, parse_images, refuse_unread
from valor.data.messages import ROW_OPTIONS, Messages, check_text, drop_nulls, kind_of, parse_messages, row_options
from valor.data.plain_rows import QUESTIONS, TRUTHS, is_plain, read_plain
from valor.errors import UserError, did_you_mean

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz")
OPTIONAL_COLUMNS = ("extra_info", "agent_name", *ROW_OPTIONS)
_USUAL = DataConfig()  # with the usual names of columns, and none of images


@dataclass(frozen=True)
class DataRow:
    """One checked row; `where` is its file and line for messages, `template` its arguments of the chat template,
    `images` what its column of images holds."""

    where: str
    messages: list[dict[str, Any]]
    data_source: str
    ground_truth: Any = None
    style: str = "rule"
    extra_info: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    images: tuple[Source, ...] = ()

    @property
    def lacks_truth(self) -> bool:
        """There is no ground truth, an empty one, or NaN, which pandas writes where there is none."""
        truth = self.ground_truth
        is_nan = isinstance(truth, float) and math.isnan(truth)
        return truth is None or is_nan or truth in ([], {}) or (isinstance(truth, str) and not truth.strip())


def read_rows(paths: str | Path | Sequence[str | Path], data: DataConfig = _USUAL) -> list[DataRow]:
    """All rows of one file or several, in order, from the columns `data.prompt_key`, `reward_fn_key` and `image_key`.

    UserError names the first bad row.
    """
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    if not files:
        raise UserError("no data file given: set data.train_files to a parquet or jsonl file, or a list of them")
    records = (record for path in files for record in prompt_records(path, data))
    return [parse_row(record, where, data) for where, record in records]


def prompt_records(path: str | Path, data: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """The file's rows in the columns of prompt files; of a file of questions and answers, made into such. Some rows of
    JSON may leave out the column of images."""
    file, keys = existing_file(path), (data.prompt_key, data.reward_fn_key)
    if file.name.endswith(".parquet"):
        columns = _parquet_columns(file)
    else:
        columns = next((record.keys() for _, record in _json_records(file, ())), ())
    images, plain = () if data.image_key is None else (data.image_key,), is_plain(columns, *keys)
    needed, others = ((), None) if plain else ((*keys, "reward_model"), (*OPTIONAL_COLUMNS, *images))
    lacks_images = bool(images)
    for where, record in read_records(path, needed, others):
        try:
            row = read_plain(record, *keys) if plain else record
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        if not images:
            refuse_unread(columns, row[data.prompt_key], where, "set data.image_key={column}, or leave the column out")
        lacks_images = lacks_images and data.image_key not in record
        yield where, row | {name: record.get(name) for name in images}
    if lacks_images:
        _require_columns(str(file), columns, images)


def _parquet_columns(file: Path) -> Collection[str]:
    """Their names; none of a file that cannot be read, which whoever reads its rows will tell."""
    try:
        return pq.read_schema(file).names
    except (pa.ArrowException, OSError, ValueError):
        return ()


def read_records(
    path: str | Path, required: Sequence[str] = (), optional: Sequence[str] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The file's rows as dictionaries, each with its file and line, read one by one. Values are not checked.

    Of a parquet file only the required and optional columns are read (`optional` None: all). UserError: the file is
    missing, empty, of an unknown kind, malformed, or lacks a required column.
    """
    file, where = existing_file(path), ""
    if file.name.endswith(".parquet"):
        records = _parquet_records(file, required, optional)
    else:
        records = _json_records(file, required)
    for where, record in records:
        yield where, record
    if not where:
        raise UserError(f"{path}: the file holds no rows; prepare it again (valor data prepare)")


def count_rows(path: str | Path) -> int:
    """The number of the file's rows. UserError: it cannot be read."""
    file = existing_file(path)
    if file.name.endswith(".parquet") and _parquet_columns(file):
        return pq.read_metadata(file).num_rows
    return sum(1 for _ in read_records(path, optional=()))


def existing_file(path: str | Path, kinds: Sequence[str] = SUFFIXES) -> Path:
    """The path with `~` expanded. UserError: it is no non-empty file of a kind that can be read."""
    file = Path(path).expanduser()
    table = f"{file.parent / file.stem}.parquet"
    csv = f"valor data prepare custom --local {quote(str(file))} --answer-column COLUMN --data-source NAME makes one"
    hints = {
        ".csv": f" (of prompts {csv}, of other rows pandas.read_csv('{file}').to_parquet('{table}'))",
        ".xlsx": f" (save it as CSV UTF-8, then {csv.replace('.xlsx', '.csv')})",
        ".arrow": f" (datasets.Dataset.from_file('{file}').to_parquet('{table}') makes one)",
    }
    saved = f": datasets.load_from_disk('{file}').to_parquet('{table}')" if (file / "state.json").exists() else ""
    wrong = {
        "this is no file's name: is a variable of the shell not set?": not str(path),
        "only local files can be read; copy it to this machine and give its path": "://" in str(path),
        "no such file; a * is not expanded: give a list, [a.parquet,b.parquet]": not file.exists() and "*" in file.name,
        "no such file; check the path, or prepare it first (valor data prepare)": not file.exists(),
        f"is a folder; give the file inside it, or a list of files{saved}": file.is_dir(),
        f"unknown kind of file; use one of {', '.join(kinds)}{hints.get(file.suffix, '')}": not any(
            map(file.name.endswith, kinds)
        ),
        "the file is empty (0 bytes); prepare it again": file.exists() and file.stat().st_size == 0,
    }
    if message := next((message for message, is_so in wrong.items() if is_so), None):
        raise UserError(f"{file if str(path) and '://' not in str(path) else repr(path)}: {message}")
    return file


def unreadable(file: Path, error: Exception) -> UserError:
    """What to do about a text file that cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        return UserError(
            f"{file}: is not in UTF-8: save it so (from Chinese Windows: iconv -f GB18030 -t UTF-8 OLD > NEW)"
        )
    return UserError(f"{file}: cannot be read ({type(error).__name__}: {error}); prepare it again")


def parse_row(record: Mapping[str, Any], where: str, data: DataConfig = _USUAL) -> DataRow:
    """One record as a DataRow. UserError: a value has the wrong type, and what it should be."""
    source = record.get(data.reward_fn_key)
    if not isinstance(source, str):
        raise UserError(f"{where}: '{data.reward_fn_key}' must be text that names a grader, got {kind_of(source)}")
    reward_model = record.get("reward_model")
    if not isinstance(reward_model, Mapping):
        raise UserError(
            f'{where}: \'reward_model\' must be {{"style": "rule", "ground_truth": ...}}, got {kind_of(reward_model)}'
        )
    truth = reward_model.get("ground_truth")
    if isinstance(truth, float) and truth.is_integer() and abs(truth) < 2**53:
        truth = int(truth)  # as whole numbers come out of a table of pandas in which one is missing
    if isinstance(truth, bytes):  # no grader would find an answer equal to it
        raise UserError(f"{where}: the ground truth must be text or a number, got {kind_of(truth)}: decode the column")
    extra_info = record.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, Mapping):
        raise UserError(f"{where}: 'extra_info' must be a dictionary or absent, got {kind_of(extra_info)}")
    agent = record.get("agent_name")
    if not isinstance(agent, str | None):
        raise UserError(f"{where}: 'agent_name' must be the name of an agent loop or absent, got {kind_of(agent)}")
    return DataRow(
        where=where,
        messages=parse_messages(
            record.get(data.prompt_key), where, data.prompt_key, image=data.image_key and PLACEHOLDER
        ),
        data_source=source,
        ground_truth=truth,
        style=str(reward_model.get("style") or "rule"),
        extra_info={**(extra_info or {}), **({"agent_name": agent} if agent is not None else {})},
        template=row_options(record, where),
        images=() if data.image_key is None else parse_images(record.get(data.image_key), where),
    )


def same_text(messages: Messages) -> str:
    """A prompt's text without differences in capitals, white space and Unicode composition."""
    text = "\n".join(f"{m.get('role')}: {m.get('content')}" for m in messages)
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def write_parquet(files: Mapping[Any, Sequence[Mapping[str, Any]]]) -> None:
    """Write records of any columns as parquet files, by their paths (text or Path); none appears under its name before
    all are written.

    UserError: a file would have no rows, or a column that parquet cannot hold.
    """
    tables = {(target := Path(path).expanduser()): _table(target, rows) for path, rows in files.items()}
    try:
        for target, table in tables.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, f"{target}.partial")
        for target in tables:
            os.replace(f"{target}.partial", target)
    except pa.ArrowException as error:  # an empty dictionary, for example
        raise UserError(f"{next(iter(tables))}: parquet cannot hold a column ({error})") from None
    finally:
        for target in tables:
            Path(f"{target}.partial").unlink(missing_ok=True)


def _table(target: Path, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    if not rows:
        raise UserError(f"{target}: there are no rows to write")
    columns = {name: pa.nulls(0) for row in rows for name in row}
    for name in columns:
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, OverflowError) as error:
            why = f"mixes types, or has numbers, that parquet cannot hold ({error}): make it text"
            raise UserError(f"{target}: the column '{name}' {why}") from None
    return pa.table(columns)


def _parquet_records(
    file: Path, required: Sequence[str], optional: Sequence[str] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with pq.ParquetFile(file) as parquet:
            names = parquet.schema_arrow.names
            _require_columns(str(file), names, required)
            columns = names if optional is None else [c for c in dict.fromkeys((*required, *optional)) if c in names]
            if twice := next((name for name in columns if names.count(name) > 1), None):
                raise UserError(f"{file}: has two columns '{twice}': leave one of them out")
            batches = parquet.iter_batches(columns=columns)
            yield from ((f"{file}, row {i}", drop_nulls(row)) for i, row in enumerate(_rows_of(batches, str(file))))
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{file}: is not a readable parquet file ({reason}); prepare it again") from None


def _rows_of(batches: Iterable[pa.RecordBatch], where: str) -> Iterator[dict[str, Any]]:
    first = 0
    for batch in batches:
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:
            for name, i in product(batch.schema.names, range(len(batch))):
                try:
                    batch[name][i].as_py()
                except UnicodeDecodeError as error:
                    message = f"{where}, row {first + i}: '{name}' has bytes that are no text ({error}): repair the row"
                    raise UserError(message) from None
        first += len(batch)


def _json_records(file: Path, required: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    opener = gzip.open if file.name.endswith(".gz") else open
    try:
        # With or without a byte-order mark; check_text names the row of half a character.
        with opener(file, "rt", encoding="utf-8-sig", errors="surrogatepass") as stream:
            if ".jsonl" in file.name:
                lines = ((f"{file}, line {i}", line) for i, line in enumerate(stream, start=1) if line.strip())
                advice = "every line must be one JSON object"
                values = ((where, _parse_json(line, where, advice)) for where, line in lines)
            else:
                rows = _parse_json(stream.read(), str(file), "for one object a line, name the file .jsonl")
                if not isinstance(rows, list):
                    raise UserError(f"{file}: must hold a list of rows, got {kind_of(rows)}")
                values = ((f"{file}, row {i}", row) for i, row in enumerate(rows))
            for where, value in values:
                if not isinstance(value, dict):
                    raise UserError(f"{where}: a row must be a JSON object, got {kind_of(value)}")
                _require_columns(where, value, required)
                check_text(value, where)
                yield where, value
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise unreadable(file, error) from None


def _parse_json(text: str, where: str, advice: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON ({error}); {advice}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """ValueError: a name is there twice, of which json keeps one without a word."""
    if len(entries := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"'{next(name for name in names if names.count(name) > 1)}' is there twice")
    return entries


def _require_columns(where: str, present: Collection[str], required: Sequence[str]) -> None:
    missing = [c for c in required if c not in present]
    if missing:
        listed = ", ".join(f"'{c}'" for c in missing)
        hint = "; data.prompt_key and data.reward_fn_key say under which name" if "reward_model" in required else ""
        hint += ", and valor data prepare custom makes such a file of yours" if hint else ""
        usual = {*required, *QUESTIONS, *TRUTHS}
        hint = next(
            filter(None, (did_you_mean(name, usual, cutoff=0.8) for name in present if name not in usual)), hint
        )
        raise UserError(f"{where}: column {listed} missing (it has {', '.join(present)}); add or rename it{hint}")
