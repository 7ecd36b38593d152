"""The mathematics grader against published labels, and ground truths against themselves; with its time.

    python benchmarks/math_equality.py [../shared/data]

The folder holds math_graded_outputs_sample.jsonl (`source`, `gold`, `output`, `label`: is the output right?),
math500.jsonl (`answer`) and RL data as parquet files with `reward_model.ground_truth`; without it there is nothing to
measure. "math-verify alone" is its `parse` and `verify` with their defaults on the whole output.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from valor.rewards import compute_score

LABELLED = "math_graded_outputs_sample.jsonl"
TRUTHS = "math500.jsonl", "verlfmt_aime24.parquet", "verlfmt_aime25.parquet", "verlfmt_minerva.parquet"


def by_valor(truth: Any, output: str) -> bool | None:
    """The grader of data source math; None where it could not decide."""
    result: Any = compute_score("math", output, truth)
    return None if "error" in result else bool(result["score"])


def by_library(truth: Any, output: str) -> bool:
    """math-verify alone."""
    from math_verify import parse, verify

    return verify(parse(f"${truth}$", parsing_timeout=None), parse(output, parsing_timeout=None), timeout_seconds=None)


def agreement(rows: list[dict[str, Any]], judge: Callable[[Any, str], bool | None]) -> str:
    """Agreement with the labels and the CPU time, as a row of a table."""
    judge(r"\int_0^1 y dy", r"\boxed{\int_0^1 x dx}")  # the import of computer algebra
    start = time.thread_time()
    verdicts = [judge(row["gold"], row["output"]) for row in rows]
    seconds = 1000 * (time.thread_time() - start) / len(rows)
    wrong = Counter((v, row["label"]) for v, row in zip(verdicts, rows, strict=True) if v is not row["label"])
    undecided = sum(verdict is None for verdict in verdicts)
    share = 1 - wrong.total() / len(rows)
    return f"| {share:.1%} | {wrong[True, False]} | {wrong[False, True]} | {undecided} | {seconds:.2f} |"


def truths_of(file: Path) -> list[Any]:
    """The ground truths in a file of one of the two kinds."""
    if file.suffix == ".jsonl":
        return [json.loads(line)["answer"] for line in file.read_text().splitlines()]
    return [row["ground_truth"] for row in pq.read_table(file, columns=["reward_model"])["reward_model"].to_pylist()]


def main() -> None:
    """Print two tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("../shared/data"))
    folder = parser.parse_args().folder
    if not (folder / LABELLED).exists():
        print(f"{folder / LABELLED}: no such file, nothing is measured")
        return
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    rows = [json.loads(line) for line in (folder / LABELLED).read_text().splitlines()]
    print(f"{len(rows)} outputs | agreement | wrongly right | wrongly wrong | undecided | CPU seconds per 1,000")
    print("|---|---|---|---|---|---|")
    print("| Valor", agreement(rows, by_valor))
    print("| math-verify alone", agreement(rows, by_library))
    print("\n| ground truths in a box | rows | score | CPU seconds per 1,000 |\n|---|---|---|---|")
    for name in TRUTHS:
        truths = truths_of(folder / name)
        start = time.thread_time()
        score = sum(by_valor(t, f"\\boxed{{{t if isinstance(t, str) else t[0]}}}") is True for t in truths)
        print(f"| {name} | {len(truths)} | {score} | {1000 * (time.thread_time() - start) / len(truths):.2f} |")


if __name__ == "__main__":
    main()
