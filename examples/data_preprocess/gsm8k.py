"""GSM8K (grade-school word problems) as training data: train.parquet and test.parquet.

    python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
    python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k --local_dataset_path DIR_OR_FILES

The second form needs no network: a folder, or the files, with gsm8k_train.jsonl and gsm8k_test.jsonl (.jsonl.gz,
.json and .parquet do as well; a clone of the hub's data set too), each row with `question` and `answer`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from valor.data.files import SUFFIXES, read_records, write_rows
from valor.errors import UserError

SPLITS = ("train", "test")
INSTRUCTION = 'Think step by step, then write the final answer as a number after "####".'
DATA_SOURCES = {"strict": "openai/gsm8k", "flexible": "openai/gsm8k-flexible"}


def row(question: str, answer: str, *, split: str, index: int, data_source: str, where: str) -> dict[str, Any]:
    """One prompt with its ground truth: the number after `####` in the reference answer, without commas."""
    solution, mark, number = answer.rpartition("####")
    if not mark:
        raise UserError(f"{where}: 'answer' has no '####' before its final number; is this GSM8K?")
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": f"{question.strip()} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": question, "answer": solution.strip()},
    }


def local_files(paths: list[Path]) -> dict[str, Path]:
    """The file of each split among the given files, or in the given folder. Raises UserError when one is not there."""
    found: dict[str, Path] = {}
    for split in SPLITS:
        names = [f"{stem}{suffix}" for stem in (f"gsm8k_{split}", split) for suffix in SUFFIXES]
        candidates = [p for p in paths if p.is_file() and split in p.name]
        for folder in (p for p in paths if p.is_dir()):
            candidates += [folder / n for n in names if (folder / n).is_file()]
            candidates += sorted(folder.glob(f"main/{split}-*.parquet"))  # the layout of the hub
        if not candidates:
            given = ", ".join(map(str, paths))
            raise UserError(f"{given}: no file for the {split} split; expected gsm8k_{split}.jsonl, or one like it")
        found[split] = candidates[0]
    return found


def hub_records() -> dict[str, Iterable[tuple[str, dict[str, Any]]]]:
    """Both splits from the Hugging Face hub, or from its cache on this machine."""
    from datasets import load_dataset
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity_error()  # without a network it would announce each of its retries
    print("loading openai/gsm8k from the Hugging Face hub ...", flush=True)
    try:
        dataset = load_dataset("openai/gsm8k", "main")
    except Exception as error:  # whatever network, proxy, cache and hub errors there are
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"openai/gsm8k cannot be loaded ({reason}); without a network, give --local_dataset_path a folder with "
            "gsm8k_train.jsonl and gsm8k_test.jsonl"
        ) from None
    return {s: [(f"openai/gsm8k {s}, row {i}", dict(r)) for i, r in enumerate(dataset[s])] for s in SPLITS}


def prepare(save_dir: Path, local_paths: list[Path] | None, data_source: str) -> None:
    """Write both parquet files; nothing is written before both splits were read."""
    if local_paths:
        splits = {s: read_records(file, ("question", "answer")) for s, file in local_files(local_paths).items()}
    else:
        splits = hub_records()
    converted = {
        split: [
            row(r["question"], r["answer"], split=split, index=i, data_source=data_source, where=where)
            for i, (where, r) in enumerate(records)
        ]
        for split, records in splits.items()
    }
    for split, rows in converted.items():
        path = save_dir.expanduser() / f"{split}.parquet"
        print(f"{path}: {write_rows(path, rows)} rows")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--local_save_dir", "--local_dir", type=Path, required=True, help="folder for the parquet files"
    )
    parser.add_argument("--local_dataset_path", type=Path, nargs="+", help="folder or files to read instead of the hub")
    parser.add_argument(
        "--grader",
        choices=DATA_SOURCES,
        default="strict",
        help='strict: the answer counts only after "####"; flexible: the last number of the response counts',
    )
    options = parser.parse_args(arguments)
    try:
        local = [p.expanduser() for p in options.local_dataset_path or []]
        prepare(options.local_save_dir, local, DATA_SOURCES[options.grader])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
