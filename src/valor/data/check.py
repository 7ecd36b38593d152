"""Is this file fit to train on? What `valor data check FILE` prints, and its exit status."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow.parquet as pq

from valor.data.files import (
    OPTIONAL_COLUMNS,
    REQUIRED_COLUMNS,
    DataRow,
    parse_row,
    read_records,
    read_rows,
    same_text,
)
from valor.data.prompts import render, token_ids
from valor.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PERCENTILES = (0, 50, 90, 99, 100)
NAMED_ROWS = 3  # how many rows a finding names


@dataclass(frozen=True)
class Finding:
    """Something to know about the file: a `problem` would stop or spoil a run, a `note` would not."""

    level: Literal["problem", "note"]
    message: str


@dataclass
class DataReport:
    """What was found in one file."""

    path: str
    num_rows: int = 0
    columns: dict[str, str] = field(default_factory=dict)
    data_sources: Counter[str] = field(default_factory=Counter)
    prompt_tokens: dict[int, int] = field(default_factory=dict)  # percentile -> length in tokens
    sample: str | None = None
    sample_ground_truth: str | None = None
    rows: list[DataRow] = field(default_factory=list, repr=False)  # those that can be read
    tables: list[str] = field(default_factory=list)  # further text to print before the findings
    findings: list[Finding] = field(default_factory=list)
    unfit: set[str] = field(default_factory=set)  # places of rows that have a problem

    @property
    def ok(self) -> bool:
        return not any(f.level == "problem" for f in self.findings)

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    def problem(self, message: str, rows: Iterable[DataRow] = ()) -> None:
        """A problem, and the rows that have it."""
        self.findings.append(Finding("problem", message))
        self.unfit |= {place(row) for row in rows}

    def note(self, message: str) -> None:
        self.findings.append(Finding("note", message))

    def __str__(self) -> str:
        """The report as it is printed."""
        lines = [f"{self.path}: {self.num_rows} rows"]
        lines += [f"  column {name}: {kind}" for name, kind in self.columns.items()]
        lines += [f"  data source {name or '(empty)'}: {count} rows" for name, count in self.data_sources.most_common()]
        if self.prompt_tokens:
            spread = ", ".join(f"p{p} {n}" for p, n in self.prompt_tokens.items())
            lines.append(f"  prompt tokens: {spread}")
        if self.sample is not None:
            lines += ["  first prompt as the model sees it:", *(f"  | {line}" for line in self.sample.splitlines())]
        if self.sample_ground_truth is not None:
            lines.append(f"  its ground truth: {self.sample_ground_truth}")
        lines += self.tables
        lines += [f"{f.level}: {f.message}" for f in sorted(self.findings, key=lambda f: f.level, reverse=True)]
        problems = sum(f.level == "problem" for f in self.findings)
        lines.append("ok" if self.ok else f"{problems} problem{'s' if problems > 1 else ''}")
        return "\n".join(lines)


def check_file(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_prompt_length: int | None = None,
    has_grader: Callable[[str], bool] | None = None,
    test_path: str | Path | None = None,
) -> DataReport:
    """Read the whole file and report columns, sources, lengths and everything that would stop or spoil a run.

    Without `tokenizer` nothing is rendered or measured; without `has_grader` no grader is looked for. Prompts that are
    in `test_path` as well are a problem. Never raises for bad data: what cannot be read is a finding.
    """
    report = DataReport(str(path))
    try:
        records = list(read_records(path, REQUIRED_COLUMNS, OPTIONAL_COLUMNS))
    except UserError as error:
        report.problem(str(error))
        return report
    report.num_rows = len(records)
    report.columns = _column_types(Path(path).expanduser(), records)
    rows = report.rows = _parsed(records, report)
    if not rows:
        return report
    report.data_sources = Counter(row.data_source for row in rows)
    report.sample_ground_truth = str(rows[0].ground_truth)
    _check_truths(report)
    _check_graders(has_grader, report)
    _check_duplicates(report)
    if test_path is not None:
        _check_overlap(test_path, report)
    if tokenizer is not None:
        _check_lengths(tokenizer, max_prompt_length, report)
    else:
        report.sample = "\n".join(f"{m['role']}: {m['content']}" for m in rows[0].messages)
        report.note("no tokenizer given: the chat template and prompt lengths were not checked")
    return report


def _column_types(file: Path, records: list[tuple[str, dict[str, Any]]]) -> dict[str, str]:
    if file.name.endswith(".parquet"):
        schema = pq.read_schema(file)
        return {name: str(schema.field(name).type) for name in schema.names}
    kinds: dict[str, set[str]] = defaultdict(set)
    for _, record in records:
        for name, value in record.items():
            kinds[name].add("null" if value is None else type(value).__name__)
    return {name: " | ".join(sorted(kind)) for name, kind in kinds.items()}


def _parsed(records: list[tuple[str, dict[str, Any]]], report: DataReport) -> list[DataRow]:
    rows, bad = [], []
    for where, record in records:
        try:
            rows.append(parse_row(record, where))
        except UserError as error:
            bad.append(str(error))
    for message in bad[:NAMED_ROWS]:
        report.problem(message)
    if len(bad) > NAMED_ROWS:
        report.problem(f"{len(bad) - NAMED_ROWS} more rows like these ({len(bad)} of {len(records)} cannot be used)")
    return rows


def _check_truths(report: DataReport) -> None:
    empty = [r for r in report.rows if r.style == "rule" and r.lacks_truth]
    if empty:
        report.problem(f"empty reward_model.ground_truth, which can never score: {_count(empty, report)}", empty)
    answered = [r for r in report.rows if r.messages[-1]["role"] == "assistant"]
    if answered:
        report.note(f"prompt ends in an assistant message, the model would begin another: {_count(answered, report)}")


def _check_graders(has_grader: Callable[[str], bool] | None, report: DataReport) -> None:
    if has_grader is None:
        report.note("graders were not looked for")
        return
    by_source: dict[str, list[DataRow]] = defaultdict(list)
    for row in report.rows:
        if row.style == "rule":
            by_source[row.data_source].append(row)
    for source, rows in by_source.items():
        if not has_grader(source):
            report.problem(
                f"data_source '{source}' ({len(rows)} rows) has no grader: rename it to one that has "
                "(valor rewards list), or set reward.custom_reward_function.path",
                rows,
            )


def _check_duplicates(report: DataReport) -> None:
    rows = report.rows
    groups: dict[str, list[DataRow]] = defaultdict(list)
    for row in rows:
        groups[same_text(row.messages)].append(row)
    repeated = [group for group in groups.values() if len(group) > 1]
    contradicting = [g for g in repeated if len({json.dumps(r.ground_truth, default=str) for r in g}) > 1]
    if contradicting:
        example = " and ".join(f"{place(r)} ({r.ground_truth})" for r in contradicting[0][:2])
        report.note(f"{len(contradicting)} prompts occur with different ground truths, for example {example}")
    if repeated:
        extra = sum(len(g) - 1 for g in repeated)
        example = " and ".join(place(r) for r in repeated[0][:2])
        report.note(f"{extra} of {len(rows)} rows repeat a prompt that is there already, for example {example}")


def _check_overlap(test_path: str | Path, report: DataReport) -> None:
    try:
        test = read_rows(test_path)
    except UserError as error:
        report.problem(str(error))
        return
    tested = {same_text(row.messages): row for row in test}
    shared = [(row, tested[key]) for row in report.rows if (key := same_text(row.messages)) in tested]
    if shared:
        examples = ", ".join(f"{place(row)} = {place(other)}" for row, other in shared[:NAMED_ROWS])
        report.problem(
            f"{len(shared)} of {len(report.rows)} prompts are in {test_path} too ({examples}), so validation would "
            "measure memory: leave them out (valor data prepare --drop-duplicates)",
            [row for row, _ in shared],
        )


def _check_lengths(tokenizer: PreTrainedTokenizerBase, limit: int | None, report: DataReport) -> None:
    try:
        texts = [render(tokenizer, r.messages, where=r.where) for r in report.rows]
    except UserError as error:
        report.problem(str(error))
        return
    report.sample = texts[0]
    lengths = np.array([len(ids) for ids in token_ids(tokenizer, texts)])
    report.prompt_tokens = {p: int(np.percentile(lengths, p, method="higher")) for p in PERCENTILES}
    overlong = [row for row, n in zip(report.rows, lengths, strict=True) if limit is not None and n > limit]
    if overlong:
        report.problem(
            f"prompt over {limit} tokens: {_count(overlong, report)}; raise data.max_prompt_length, or set "
            "data.filter_overlong_prompts=true or data.truncation=left|right|middle",
            overlong,
        )


def place(row: DataRow) -> str:
    """Where the row is in its file: `row 3` of parquet and json, `line 4` of jsonl."""
    return row.where.rpartition(", ")[2]  # the file is named once, at the top


def _count(some: list[DataRow], report: DataReport) -> str:
    named = ", ".join(place(r) for r in some[:NAMED_ROWS])
    return f"{len(some)} of {len(report.rows)} rows ({named}{', ...' if len(some) > NAMED_ROWS else ''})"
