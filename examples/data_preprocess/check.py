"""Is this file fit to train on? Lengths, duplicates, graders; exit code 1 when it is not.

python examples/data_preprocess/check.py FILE [--test FILE] [--model PATH --max-prompt-length N] [--custom PATH]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from valor.config import DataConfig
from valor.data.files import DataRow, parse_row, prompt_records, read_records, same_text
from valor.data.prompts import render, token_ids
from valor.errors import UserError, exit_code
from valor.rewards.custom import CustomFunction
from valor.rewards.executor import RewardExecutor
from valor.rewards.functions import takes_lists
from valor.rewards.registry import find_grader
from valor.rewards.worker import Sample
from valor.user_files import load_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WRONG = "I don't know."
PERCENTILES = (0, 50, 90, 99, 100)
NAMED_ROWS = 3  # how many rows a finding names


@dataclass
class Report:
    """What was found in one file: a problem would stop or spoil a run, a note would not.

    `rows` are those that can be read, `facts` lines to print before the findings.
    """

    path: str
    rows: list[DataRow] = field(default_factory=list, repr=False)
    facts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 1 if self.problems else 0

    def __str__(self) -> str:
        """The report as it is printed."""
        findings = [f"problem: {problem}" for problem in self.problems] + [f"note: {note}" for note in self.notes]
        count = len(self.problems)
        return "\n".join([*self.facts, *findings, f"{count} problem{'s' * (count > 1)}" if count else "ok"])


def check_rows(
    path: str | Path,
    is_graded: Callable[[str], bool],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_prompt_length: int | None = None,
    test_path: str | Path | None = None,
) -> Report:
    """Read the whole file and report sources, lengths and everything that would stop or spoil a run.

    `is_graded` says whether a data source has a grader. Without `tokenizer` nothing is rendered or measured. Prompts
    that are in `test_path` as well are a problem. Never raises for bad data: what cannot be read is a finding.
    """
    report = Report(str(path))
    try:
        data, records = _read(path)
    except UserError as error:
        report.problems.append(str(error))
        return report
    report.facts = [f"{path}: {len(records)} rows"]
    rows = report.rows = _parsed(records, data, report)
    if not rows:
        return report
    sources = Counter(row.data_source for row in rows).most_common()
    report.facts += [f"  data source {name or '(empty)'}: {count} rows" for name, count in sources]
    if tokenizer is not None:
        sample = _check_lengths(tokenizer, max_prompt_length, report)
    else:
        sample = "\n".join(f"{m['role']}: {m['content']}" for m in rows[0].messages)
        report.notes.append("no tokenizer given: the chat template and prompt lengths were not checked")
    report.facts += ["  first prompt as the model sees it:", *(f"  | {line}" for line in sample.splitlines())]
    report.facts.append(f"  its ground truth: {rows[0].ground_truth}")
    _check_truths(is_graded, report)
    _check_duplicates(report)
    if test_path is not None:
        _check_overlap(test_path, report)
    return report


def _read(path: str | Path) -> tuple[DataConfig, list[tuple[str, dict[str, Any]]]]:
    """The rows as a run reads them, with images where there are some."""
    names = {name for _, record in read_records(path) for name in record}
    data = DataConfig(image_key="images" if "images" in names else None)
    return data, list(prompt_records(path, data))


def _parsed(records: list[tuple[str, dict[str, Any]]], data: DataConfig, report: Report) -> list[DataRow]:
    rows, bad = [], []
    for where, record in records:
        try:
            rows.append(parse_row(record, where, data))
        except UserError as error:
            bad.append(str(error))
    report.problems += bad[:NAMED_ROWS]
    if len(bad) > NAMED_ROWS:
        report.problems.append(
            f"{len(bad) - NAMED_ROWS} more rows like these ({len(bad)} of {len(records)} cannot be used)"
        )
    return rows


def _check_truths(is_graded: Callable[[str], bool], report: Report) -> None:
    by_rule = [row for row in report.rows if row.style == "rule"]
    if empty := [row for row in by_rule if row.lacks_truth]:
        report.problems.append(f"empty reward_model.ground_truth, which can never score: {count_rows(empty, report)}")
    for source in dict.fromkeys(row.data_source for row in by_rule):
        if not is_graded(source):
            count = sum(row.data_source == source for row in by_rule)
            report.problems.append(
                f"data_source '{source}' ({count} rows) has no grader: rename it to one that has "
                "(valor rewards list), or set reward.custom_reward_function.path"
            )
    if answered := [row for row in report.rows if row.messages[-1]["role"] == "assistant"]:
        count = count_rows(answered, report)
        report.notes.append(f"prompt ends in an assistant message, the model would begin another: {count}")


def _check_duplicates(report: Report) -> None:
    groups: dict[str, list[DataRow]] = defaultdict(list)
    for row in report.rows:
        groups[same_text(row.messages)].append(row)
    repeated = [group for group in groups.values() if len(group) > 1]
    contradicting = [g for g in repeated if len({json.dumps(r.ground_truth, default=str) for r in g}) > 1]
    if contradicting:
        example = " and ".join(f"{place_of(row)} ({row.ground_truth})" for row in contradicting[0][:2])
        report.notes.append(f"{len(contradicting)} prompts occur with different ground truths, for example {example}")
    if repeated:
        extra = f"{sum(len(group) - 1 for group in repeated)} of {len(report.rows)} rows"
        example = " and ".join(place_of(row) for row in repeated[0][:2])
        report.notes.append(f"{extra} repeat a prompt that is there already, for example {example}")


def _check_overlap(test_path: str | Path, report: Report) -> None:
    try:
        data, records = _read(test_path)
        parsed = (parse_row(record, where, data) for where, record in records)
        tested = {same_text(row.messages): row for row in parsed}
    except UserError as error:
        report.problems.append(str(error))
        return
    shared = [(row, tested[key]) for row in report.rows if (key := same_text(row.messages)) in tested]
    if shared:
        examples = ", ".join(f"{place_of(row)} = {place_of(other)}" for row, other in shared[:NAMED_ROWS])
        report.problems.append(
            f"{len(shared)} of {len(report.rows)} prompts are in {test_path} too ({examples}), so validation would "
            "measure memory: leave them out (valor data prepare --drop-duplicates)"
        )


def _check_lengths(tokenizer: PreTrainedTokenizerBase, limit: int | None, report: Report) -> str:
    """Returns the first prompt as the model sees it, "" if the template refuses one."""
    try:
        texts = [render(tokenizer, row.messages, row.template, row.where) for row in report.rows]
    except UserError as error:
        report.problems.append(str(error))
        return ""
    lengths = np.array([len(ids) for ids in token_ids(tokenizer, texts)])
    spread = ", ".join(f"p{p} {np.percentile(lengths, p, method='higher')}" for p in PERCENTILES)
    report.facts.append(f"  prompt tokens: {spread}")
    overlong = [row for row, n in zip(report.rows, lengths, strict=True) if limit is not None and n > limit]
    if overlong:
        report.problems.append(
            f"prompt over {limit} tokens: {count_rows(overlong, report)}; raise data.max_prompt_length, or set "
            "data.filter_overlong_prompts=true or data.truncation=left|right|middle"
        )
    return texts[0]


def place_of(row: DataRow) -> str:
    """Where the row is in its file: `row 3` of parquet and json, `line 4` of jsonl."""
    return row.where.rpartition(", ")[2]


def count_rows(some: list[DataRow], report: Report) -> str:
    """How many, and the first of them."""
    named = ", ".join(place_of(row) for row in some[:NAMED_ROWS])
    return f"{len(some)} of {len(report.rows)} rows ({named}{', ...' if len(some) > NAMED_ROWS else ''})"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    return exit_code(lambda: _check(argv))


def _check(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        description="Can this file be trained on? Lengths, duplicates, graders; exit code 1 if not.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a training file")
    parser.add_argument("--test", type=Path, metavar="FILE", help="a validation file: its prompts must not be in FILE")
    parser.add_argument("--model", metavar="PATH", help="a model or tokenizer: renders and measures the prompts")
    parser.add_argument("--max-prompt-length", type=int, metavar="TOKENS", help="with --model (default 512)")
    parser.add_argument("--custom", metavar="PATH", help="your own grader: the file of custom_reward_function.path")
    parser.add_argument("--custom-name", default="compute_score", metavar="NAME", help="its function")
    args = parser.parse_args(argv)
    for file in (args.file, args.test):
        if file is not None and not file.exists():
            raise UserError(f"{file}: no such file; valor data prepare makes one")
    if args.max_prompt_length and not args.model:
        raise UserError("--max-prompt-length counts tokens: say whose with --model")
    tokenizer = None
    if args.model:
        from valor.models.load import load_tokenizer

        tokenizer = load_tokenizer(args.model, require_chat_template=True)
    custom = _custom(args.custom, args.custom_name) if args.custom else None
    report = check_rows(
        args.file,
        (lambda _: True) if custom else find_grader,
        tokenizer,
        max_prompt_length=args.max_prompt_length or 512,
        test_path=args.test,
    )
    with RewardExecutor(custom=custom) as executor:
        _grade(report, executor)
    print(report)
    return report.exit_code


def _custom(path: str, name: str) -> CustomFunction:
    """The user's function, of samples or of batches."""
    function = load_object(f"{path.removeprefix('pkg://')}:{name}", "--custom, --custom-name")
    return CustomFunction(path, name, whole_batch=takes_lists(function))


def _grade(report: Report, executor: RewardExecutor) -> None:
    """Add what graders make of a wrong answer to each row; rows without grader or ground truth are told already."""
    rows = [
        row
        for row in report.rows
        if row.style == "rule" and not row.lacks_truth and (executor.custom or find_grader(row.data_source))
    ]
    results = executor.score([Sample(row.data_source, WRONG, row.ground_truth, row.extra_info) for row in rows])
    graded = list(zip(rows, results, strict=True))
    if failed := [(row, result.error) for row, result in graded if result.error is not None]:
        count = count_rows([row for row, _ in failed], report)
        report.problems.append(f"the grader fails on {count}; the first: {failed[0][1]}")
    if fooled := [row for row, result in graded if result.correct]:
        report.problems.append(f"the grader takes {WRONG!r} for right: {count_rows(fooled, report)}")


if __name__ == "__main__":
    sys.exit(main())
