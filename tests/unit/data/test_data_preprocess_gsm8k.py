"""The GSM8K script: from local files to rows that the library reads and its grader can score."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from valor.data.check import check_file
from valor.data.files import read_rows
from valor.rewards import compute_score
from valor.rewards.registry import has_grader

SCRIPT = Path(__file__).parents[3] / "examples" / "data_preprocess" / "gsm8k.py"


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for split, number in (("train", "1,072"), ("test", "-3")):
        row = {"question": f"A {split} question?", "answer": f"First <<1+1=2>>2.\n#### {number}"}
        (folder / f"gsm8k_{split}.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "another_test.jsonl").write_text("{}\n")
    return folder


def test_local_files_become_rows(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("--local_save_dir", out, "--local_dataset_path", source)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{out}/train.parquet: 1 rows\n{out}/test.parquet: 1 rows\n"
    (row,) = read_rows(out / "train.parquet")
    assert row.data_source == "openai/gsm8k" and row.ability == "math" and row.style == "rule"
    assert row.ground_truth == "1072"
    assert row.messages[0]["role"] == "user"
    assert row.messages[0]["content"].startswith("A train question? ") and "####" in row.messages[0]["content"]
    assert row.extra_info == {
        "split": "train", "index": 0, "question": "A train question?", "answer": "First <<1+1=2>>2.",
    }  # fmt: skip
    assert read_rows(out / "test.parquet")[0].ground_truth == "-3"
    files = (source / "gsm8k_test.jsonl", source / "gsm8k_train.jsonl")
    result = run("--local_dir", out, "--grader", "flexible", "--local_dataset_path", *files)
    assert result.returncode == 0, result.stderr
    assert read_rows(out / "train.parquet")[0].data_source == "openai/gsm8k-flexible"


def test_mistakes_are_one_line_and_write_nothing(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (source / "gsm8k_test.jsonl").write_text(json.dumps({"question": "?", "answer": "3"}) + "\n")
    no_mark = run("--local_save_dir", out, "--local_dataset_path", source)
    (source / "gsm8k_test.jsonl").write_text(json.dumps({"question": "?"}) + "\n")
    no_answer = run("--local_save_dir", out, "--local_dataset_path", source)
    (source / "gsm8k_test.jsonl").unlink()
    no_test = run("--local_save_dir", out, "--local_dataset_path", source)
    no_hub = run("--local_save_dir", out, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "cache"))
    for result, words in (
        (no_mark, "gsm8k_test.jsonl, line 1: 'answer' has no '####'"),
        (no_answer, "gsm8k_test.jsonl, line 1: column 'answer' missing"),
        (no_test, "no file for the test split"),
        (no_hub, "give --local_dataset_path"),
    ):
        assert result.returncode == 2
        assert words in result.stderr and result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    assert not out.exists()


def test_the_real_data_set(shared_dir: Path, tmp_path: Path) -> None:
    result = run("--local_save_dir", tmp_path, "--local_dataset_path", shared_dir / "data")
    assert result.returncode == 0, result.stderr
    for name, count in (("train", 7473), ("test", 1319)):
        report = check_file(tmp_path / f"{name}.parquet", has_grader=has_grader)
        assert (report.num_rows, report.exit_code) == (count, 0), str(report)
    rows = read_rows(tmp_path / "test.parquet")
    scores = [compute_score(r.data_source, f"So it is\n#### {r.ground_truth}", r.ground_truth) for r in rows[:200]]
    assert all(s["score"] == 1.0 for s in scores)  # type: ignore[index]
