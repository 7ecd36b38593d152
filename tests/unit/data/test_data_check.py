"""`check_rows` finds each planted fault, and is content with good data."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from valor.data.files import write_parquet
from valor.user_files import load_file

CHECK = load_file(str(Path(__file__).parents[3] / "examples" / "data_preprocess" / "check.py"), "path")
check_rows = CHECK.check_rows


def record(text: str, truth: Any = "2", **more: Any) -> dict[str, Any]:
    return {
        "data_source": "valor/arithmetic",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        **more,
    }


def is_arithmetic(source: str) -> bool:
    return source == "valor/arithmetic"


def check(path: Path, *records: dict[str, Any], **options: Any) -> Any:
    file = path / "a.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return check_rows(file, is_arithmetic, **options)


def test_good_data(tmp_path: Path, tokenizer: Any) -> None:
    write_parquet({tmp_path / "a.parquet": [record("x" * n) for n in range(1, 101)]})
    report = check_rows(tmp_path / "a.parquet", is_arithmetic, tokenizer, max_prompt_length=117)
    assert (report.exit_code, report.problems, report.notes) == (0, [], [])
    text = str(report)
    for words in (
        "a.parquet: 100 rows\n",
        "  data source valor/arithmetic: 100 rows\n",
        "  prompt tokens: p0 18, p50 68, p90 108, p99 117, p100 117\n",  # 17 for the roles; p50 rounds up
        "  | <user>x<assistant>\n",
        "  its ground truth: 2\n",
    ):
        assert words in text, text
    assert text.endswith("\nok")


def test_without_a_tokenizer_nothing_is_rendered(tmp_path: Path) -> None:
    report = check(tmp_path, record("one"))
    assert report.exit_code == 0 and "  | user: one\n" in str(report)
    assert "not checked" in report.notes[0]


def test_places_of_images_are_no_problem(tmp_path: Path) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "2?"}]
    rows = [record("<image>1?", images=["a.png"]), record("", prompt=[{"role": "user", "content": parts}])]
    (tmp_path / "a.png").touch()
    (tmp_path / "test.jsonl").write_text(json.dumps(record("<image>3?", images=["a.png"])) + "\n")
    assert check(tmp_path, *rows, test_path=tmp_path / "test.jsonl").problems == []


def test_questions_and_answers_are_read_as_a_run_reads_them(tmp_path: Path) -> None:
    rows = [{"question": "1+1", "answer": "2"}, {"question": "1+2", "answer": ""}]
    report = check(tmp_path, *rows, test_path=tmp_path / "a.jsonl")
    assert [(row.data_source, row.ground_truth) for row in report.rows] == [("own", "2"), ("own", "")]
    assert [problem.partition(":")[0] for problem in report.problems] == [
        "empty reward_model.ground_truth, which can never score",
        "data_source 'own' (2 rows) has no grader",
        f"2 of 2 prompts are in {tmp_path / 'a.jsonl'} too (line 1 = line 1, line 2 = line 2), so validation would "
        "measure memory",
    ]


def test_prompts_are_measured_with_what_their_rows_give_the_template(tmp_path: Path, tokenizer: Any) -> None:
    thinks = deepcopy(tokenizer)
    thinks.chat_template = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}"
    rows = [record("one"), record("two", enable_thinking=True)]
    report = check(tmp_path, *rows, tokenizer=thinks, max_prompt_length=3)
    assert [problem.partition(";")[0] for problem in report.problems] == ["prompt over 3 tokens: 1 of 2 rows (line 2)"]


def test_prompts_over_the_limit(tmp_path: Path, tokenizer: Any) -> None:
    report = check(tmp_path, *[record("x" * n) for n in range(1, 11)], tokenizer=tokenizer, max_prompt_length=25)
    (problem,) = report.problems
    assert problem.startswith("prompt over 25 tokens: 2 of 10 rows (line 9, line 10); raise data.max_prompt_length")
    assert report.exit_code == 1
    assert str(report).endswith("\n1 problem")


def test_no_grader(tmp_path: Path) -> None:
    report = check(tmp_path, record("a"), record("b", data_source="openai/gsm8"), record("c", data_source="model"))
    assert [p.split(" has no grader")[0] for p in report.problems] == [
        "data_source 'openai/gsm8' (1 rows)",
        "data_source 'model' (1 rows)",
    ]
    learned = {"style": "model", "ground_truth": None}
    assert check(tmp_path, record("d", data_source="model", reward_model=learned)).exit_code == 0


@pytest.mark.parametrize("truth", [None, "", "  ", []])
def test_empty_ground_truths(tmp_path: Path, truth: Any) -> None:
    (problem,) = check(tmp_path, record("a"), record("b", truth)).problems
    assert problem == "empty reward_model.ground_truth, which can never score: 1 of 2 rows (line 2)"
    assert check(tmp_path, record("zero", 0)).exit_code == 0


def test_duplicates(tmp_path: Path) -> None:
    report = check(tmp_path, record("a"), record("b"), record("a"), record("a"))
    assert report.exit_code == 0  # harmless, but worth a note
    assert any("2 of 4 rows repeat a prompt" in note and "line 3" in note for note in report.notes)
    report = check(tmp_path, record("a", "2"), record("a", "3"))
    assert any("1 prompts occur with different ground truths" in n and "line 2 (3)" in n for n in report.notes)


def test_bad_rows_are_counted_and_the_first_ones_named(tmp_path: Path) -> None:
    report = check(tmp_path, record("a"), *[record("b", reward_model=str(i)) for i in range(10)])
    assert len(report.problems) == 4
    assert "line 2: 'reward_model' must be" in report.problems[0]
    assert "7 more rows like these (10 of 11 cannot be used)" in report.problems[3]
    assert check(tmp_path, record("a", prompt="text")).problems  # nothing but bad rows


def test_unreadable_files_are_findings(tmp_path: Path) -> None:
    assert "no such file" in check_rows(tmp_path / "no.parquet", is_arithmetic).problems[0]
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    assert "not a readable parquet" in check_rows(tmp_path / "b.parquet", is_arithmetic).problems[0]
    report = check(tmp_path, {"query": "?"})
    assert "column 'prompt', 'data_source', 'reward_model' missing" in report.problems[0]


def test_a_template_that_refuses_and_a_prompt_that_ends_with_an_answer(tmp_path: Path, tokenizer: Any) -> None:
    tool = [{"role": "tool", "content": "x"}]
    assert "chat template refuses" in check(tmp_path, record("", prompt=tool), tokenizer=tokenizer).problems[0]
    answered = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    report = check(tmp_path, record("", prompt=answered))
    assert report.exit_code == 0 and any("ends in an assistant message" in note for note in report.notes)


def test_real_files(shared_dir: Path) -> None:
    report = check_rows(shared_dir / "data" / "verlfmt_minerva.parquet", lambda source: False)
    assert "data_source '' (272 rows) has no grader" in report.problems[0]
    report = check_rows(shared_dir / "data" / "bigmath_rl_prime_verlfmt_5000.parquet", lambda source: True)
    assert len(report.rows) == 5000
    assert report.problems == ["empty reward_model.ground_truth, which can never score: 1 of 5000 rows (row 3347)"]
