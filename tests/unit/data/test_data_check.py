"""`check_file` finds each planted fault, and is content with good data."""

import json
from pathlib import Path
from typing import Any

import pytest

from valor.data.check import DataReport, check_file
from valor.data.files import write_rows


def record(text: str, truth: Any = "2", **more: Any) -> dict[str, Any]:
    return {
        "data_source": "valor/arithmetic",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        **more,
    }


def check(path: Path, *records: dict[str, Any], **options: Any) -> DataReport:
    file = path / "a.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return check_file(file, has_grader=lambda source: source == "valor/arithmetic", **options)


def problems(report: DataReport) -> list[str]:
    return [f.message for f in report.findings if f.level == "problem"]


def test_good_data(tmp_path: Path, tokenizer: Any) -> None:
    write_rows(tmp_path / "a.parquet", [record("x" * n) for n in range(1, 101)])
    report = check_file(
        tmp_path / "a.parquet", tokenizer, max_prompt_length=117, has_grader=lambda s: s == "valor/arithmetic"
    )
    assert (report.ok, report.exit_code, report.findings) == (True, 0, [])
    assert report.num_rows == 100
    assert report.data_sources == {"valor/arithmetic": 100}
    assert report.prompt_tokens == {0: 18, 50: 68, 90: 108, 99: 117, 100: 117}  # 17 for the roles; p50 rounds up
    assert report.sample == "<user>x<assistant>"
    assert report.columns["data_source"] == "string"
    assert report.columns["reward_model"].startswith("struct<")
    text = str(report)
    for words in ("100 rows", "prompt tokens: p0 18", "| <user>x<assistant>", "its ground truth: 2"):
        assert words in text
    assert text.endswith("\nok")


def test_without_a_tokenizer_nothing_is_rendered(tmp_path: Path) -> None:
    report = check(tmp_path, record("one"))
    assert report.ok
    assert report.sample == "user: one"
    assert "not checked" in report.findings[0].message


def test_prompts_over_the_limit(tmp_path: Path, tokenizer: Any) -> None:
    report = check(tmp_path, *[record("x" * n) for n in range(1, 11)], tokenizer=tokenizer, max_prompt_length=25)
    (problem,) = problems(report)
    assert problem.startswith("prompt over 25 tokens: 2 of 10 rows (line 9, line 10); raise data.max_prompt_length")
    assert report.exit_code == 1
    assert str(report).endswith("\n1 problem")


def test_no_grader(tmp_path: Path) -> None:
    report = check(tmp_path, record("a"), record("b", data_source="openai/gsm8"), record("c", data_source="model"))
    assert [p.split(" has no grader")[0] for p in problems(report)] == [
        "data_source 'openai/gsm8' (1 rows)",
        "data_source 'model' (1 rows)",
    ]
    learned = {"style": "model", "ground_truth": None}
    assert check(tmp_path, record("d", data_source="model", reward_model=learned)).ok


@pytest.mark.parametrize("truth", [None, "", "  ", []])
def test_empty_ground_truths(tmp_path: Path, truth: Any) -> None:
    (problem,) = problems(check(tmp_path, record("a"), record("b", truth)))
    assert problem == "empty reward_model.ground_truth, which can never score: 1 of 2 rows (line 2)"
    assert check(tmp_path, record("zero", 0)).ok


def test_duplicates(tmp_path: Path) -> None:
    report = check(tmp_path, record("a"), record("b"), record("a"), record("a"))
    assert report.ok  # harmless, but worth a note
    assert any("2 of 4 rows repeat a prompt" in f.message and "line 3" in f.message for f in report.findings)
    report = check(tmp_path, record("a", "2"), record("a", "3"))
    notes = [f.message for f in report.findings]
    assert any("1 prompts occur with different ground truths" in n and "line 2 (3)" in n for n in notes)


def test_bad_rows_are_counted_and_the_first_ones_named(tmp_path: Path) -> None:
    report = check(tmp_path, record("a"), *[record("b", reward_model=str(i)) for i in range(10)])
    assert len(problems(report)) == 4
    assert "line 2: 'reward_model' must be" in problems(report)[0]
    assert "7 more rows like these (10 of 11 cannot be used)" in problems(report)[3]
    assert problems(check(tmp_path, record("a", prompt="text")))  # nothing but bad rows


def test_unreadable_files_are_findings(tmp_path: Path) -> None:
    assert "no such file" in problems(check_file(tmp_path / "no.parquet"))[0]
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    assert "not a readable parquet" in problems(check_file(tmp_path / "b.parquet"))[0]
    report = check(tmp_path, {"question": "?"})
    assert "column 'prompt', 'data_source', 'reward_model' missing" in problems(report)[0]


def test_a_template_that_refuses_and_a_prompt_that_ends_with_an_answer(tmp_path: Path, tokenizer: Any) -> None:
    tool = [{"role": "tool", "content": "x"}]
    assert "chat template refuses" in problems(check(tmp_path, record("", prompt=tool), tokenizer=tokenizer))[0]
    answered = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    report = check(tmp_path, record("", prompt=answered))
    assert report.ok and "ends in an assistant message" in report.findings[0].message


def test_column_types_of_json_files(tmp_path: Path) -> None:
    report = check(tmp_path, record("a", extra_info=None), record("b", extra_info={"index": 1}))
    assert report.columns["extra_info"] == "dict | null"


def test_real_files(shared_dir: Path) -> None:
    report = check_file(shared_dir / "data" / "verlfmt_minerva.parquet", has_grader=lambda source: False)
    assert "data_source '' (272 rows) has no grader" in problems(report)[0]
    report = check_file(shared_dir / "data" / "bigmath_rl_prime_verlfmt_5000.parquet")
    assert report.num_rows == 5000
    assert problems(report) == ["empty reward_model.ground_truth, which can never score: 1 of 5000 rows (row 3347)"]
