"""`valor data check`: is this data fit to train on? Exit code 1 when it is not."""

from __future__ import annotations

import argparse
from pathlib import Path

from valor.errors import UserError
from valor.lab.row_checks import Report, check_rows, count_rows
from valor.rewards.custom import CustomFunction
from valor.rewards.executor import RewardExecutor
from valor.rewards.registry import has_grader
from valor.rewards.worker import Sample

_WRONG = "I don't know."


def data_check(argv: list[str]) -> int:
    """Lengths, duplicates, missing graders, and ground truths that their graders cannot work with."""
    parser = argparse.ArgumentParser(
        prog="valor data check",
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
    custom = CustomFunction(args.custom, args.custom_name) if args.custom else None
    report = check_rows(
        args.file,
        (lambda _: True) if custom else has_grader,
        tokenizer,
        max_prompt_length=args.max_prompt_length or 512,
        test_path=args.test,
    )
    with RewardExecutor(custom=custom) as executor:
        _grade(report, executor)
    print(report)
    return report.exit_code


def _grade(report: Report, executor: RewardExecutor) -> None:
    """Add what graders make of a wrong answer to each row; rows without grader or ground truth are told already."""
    rows = [
        row
        for row in report.rows
        if row.style == "rule" and not row.lacks_truth and (executor.custom or has_grader(row.data_source))
    ]
    results = executor.score([Sample(row.data_source, _WRONG, row.ground_truth, row.extra_info) for row in rows])
    graded = list(zip(rows, results, strict=True))
    if failed := [(row, result.error) for row, result in graded if result.error is not None]:
        count = count_rows([row for row, _ in failed], report)
        report.problems.append(f"the grader fails on {count}; the first: {failed[0][1]}")
    if fooled := [row for row, result in graded if result.correct]:
        report.problems.append(f"the grader takes {_WRONG!r} for right: {count_rows(fooled, report)}")
