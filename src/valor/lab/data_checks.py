"""`valor data check` and `valor rewards check`: is this data fit to train on? Exit code 1 when it is not."""

from __future__ import annotations

import argparse
from pathlib import Path

from valor.errors import UserError
from valor.lab.grader_checks import check_truths
from valor.lab.row_checks import Report, check_rows
from valor.rewards.custom import CustomFunction
from valor.rewards.executor import RewardExecutor
from valor.rewards.registry import has_grader


def data_check(argv: list[str]) -> int:
    """Lengths, duplicates, missing graders: nothing is graded."""
    parser = _parser("data check", "Can this file be trained on? Lengths, duplicates, graders; exit code 1 if not.")
    report = _checked(parser.parse_args(argv), any_grader=False)
    print(report)
    return report.exit_code


def rewards_check(argv: list[str]) -> int:
    """All of `data check`, then the graders: ground truths against themselves."""
    parser = _parser(
        "rewards check",
        "All that `valor data check` finds, and whether the graders work on this data: right answers, made of the "
        "ground truths, must score and empty ones must not. Exit code 1 when training should not start.",
    )
    parser.add_argument("--custom", metavar="PATH", help="your own grader: the file of custom_reward_function.path")
    parser.add_argument("--custom-name", default="compute_score", metavar="NAME", help="its function")
    parser.add_argument("--limit", type=int, metavar="N", help="grade only N rows, evenly spread over the file")
    parser.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="for one grading (default 10)")
    parser.add_argument("--num-workers", type=int, metavar="N", help="grader processes (default one a core)")
    args = parser.parse_args(argv)
    custom = CustomFunction(args.custom, args.custom_name) if args.custom else None
    report = _checked(args, any_grader=custom is not None)
    if report.rows:
        with RewardExecutor(num_workers=args.num_workers, timeout=args.timeout, custom=custom) as executor:
            _grade(report, executor, args.limit)
    print(report)
    return report.exit_code


def _checked(args: argparse.Namespace, *, any_grader: bool) -> Report:
    for file in (args.file, args.test):
        if file is not None and not file.exists():
            raise UserError(f"{file}: no such file; valor data prepare makes one")
    if args.max_prompt_length and not args.model:
        raise UserError("--max-prompt-length counts tokens: say whose with --model")
    tokenizer = None
    if args.model:
        from valor.models.load import load_tokenizer

        tokenizer = load_tokenizer(args.model, require_chat_template=True)
    return check_rows(
        args.file,
        (lambda _: True) if any_grader else has_grader,
        tokenizer,
        max_prompt_length=args.max_prompt_length or 512,
        test_path=args.test,
    )


def _grade(report: Report, executor: RewardExecutor, limit: int | None) -> None:
    """Add to the report what graders make of the rows; those without grader or ground truth are in it already."""
    rows = [
        row
        for row in report.rows
        if row.style == "rule" and not row.lacks_truth and (executor.custom or has_grader(row.data_source))
    ]
    if limit is not None and limit < len(rows):
        rows = [rows[i * len(rows) // limit] for i in range(limit)]
    if rows:
        check_truths(rows, executor, report)


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"valor {command}", description=description)
    parser.add_argument("file", type=Path, metavar="FILE", help="a training file")
    parser.add_argument("--test", type=Path, metavar="FILE", help="a validation file: its prompts must not be in FILE")
    parser.add_argument("--model", metavar="PATH", help="a model or tokenizer: renders and measures the prompts")
    parser.add_argument("--max-prompt-length", type=int, metavar="TOKENS", help="with --model (default 512)")
    return parser
