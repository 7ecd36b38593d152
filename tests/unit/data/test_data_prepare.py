"""`valor data prepare` and the scripts in examples: what is written, what is refused, and what is told."""

import json
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from valor.data.files import read_rows
from valor.data.prepare import main, script
from valor.data.recipes import RECIPES
from valor.errors import UserError
from valor.rewards import compute_score
from valor.rewards.registry import find_grader
from valor.user_files import load_file

SCRIPTS = Path(__file__).parents[3] / "examples" / "data_preprocess"


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for split, number in (("train", "1,072"), ("test", "-3")):
        record = {"question": f"A {split} question?", "answer": f"First <<1+1=2>>2.\n#### {number}"}
        write(folder / f"gsm8k_{split}.jsonl", record)
    return folder


def given(folder: Path) -> list[str]:
    """Both files of the folder, with their splits."""
    return [f"{split}={folder / f'gsm8k_{split}.jsonl'}" for split in ("train", "test")]


def test_gsm8k(gsm8k: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["gsm8k", "--out", str(out), "--local", *given(gsm8k)]) == 0
    assert capsys.readouterr().out == f"{out}/train.parquet: 1 rows\n{out}/test.parquet: 1 rows\n"
    (row,) = read_rows(out / "train.parquet")
    assert (row.data_source, row.style, row.ground_truth) == ("openai/gsm8k", "rule", "1072")
    assert row.messages[0]["content"].startswith("A train question? ") and "####" in row.messages[0]["content"]
    assert row.extra_info == {
        "split": "train", "index": 0, "question": "A train question?", "answer": "First <<1+1=2>>2.",
    }  # fmt: skip
    assert read_rows(out / "test.parquet")[0].ground_truth == "-3"
    options = ["--data-source", "openai/gsm8k-flexible", "--template", "Q: {question}"]
    assert main(["gsm8k", "--out", str(out), "--local", *given(gsm8k), *options]) == 0
    (row,) = read_rows(out / "train.parquet")
    assert row.data_source == "openai/gsm8k-flexible"
    assert [m["content"] for m in row.messages] == ["Q: A train question?"]


def test_a_script_with_verls_flags(gsm8k: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "gsm8k.py"), "--local_dataset_path", *given(gsm8k), "--local_save_dir"]
    result = subprocess.run([*command, str(tmp_path / "out")], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    assert read_rows(tmp_path / "out" / "train.parquet")[0].ground_truth == "1072"


def test_every_script_names_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr("valor.data.prepare.script", lambda name, argv=None: called.append(name) or 0)
    for path in sorted({*SCRIPTS.glob("*.py")} - {SCRIPTS / "check.py"}):
        monkeypatch.setattr(sys, "argv", [str(path), "--split", "rm"])
        with pytest.raises(SystemExit):
            runpy.run_path(str(path), run_name="__main__")
        assert called[-1] in RECIPES, path
    assert set(called) >= {"gsm8k", "math", "math500", "dapo_math", "hh_rlhf", "ultrafeedback"}


def test_the_hh_script_makes_what_verls_split_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"prompt": "\n\nHuman: Hi\n\nAssistant:", "chosen": " Hello.", "rejected": " Go."}
    source = write(tmp_path / "a.jsonl", record, {**record, "rejected": " No."})
    for split, column in (("rm", "chosen"), ("sft", "messages"), ("rl", "reward_model")):
        argv = ["--split", split, "--local_dir", str(tmp_path / "hh"), "--local", f"train={source}", f"test={source}"]
        monkeypatch.setattr(sys, "argv", ["full_hh_rlhf.py", *argv])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPTS / "full_hh_rlhf.py"), run_name="__main__")
        assert end.value.code == 0
        assert column in pq.read_schema(tmp_path / "hh" / split / "train.parquet").names


def test_without_a_network_one_line_says_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    code = "import sys; from valor.data.prepare import script; sys.exit(script('math500', sys.argv[1:]))"
    result = subprocess.run(
        [sys.executable, "-c", code, "--out", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: HuggingFaceH4/MATH-500 cannot be loaded (")
    assert "give the files: --local PATH" in result.stderr
    assert not (tmp_path / "out").exists()


def test_mistakes_are_one_line_and_write_nothing(
    gsm8k: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def mistake(*argv: str) -> str:
        assert script(argv[0], [*argv[1:], "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        assert not out.exists()
        return error

    files = given(gsm8k)
    write(gsm8k / "gsm8k_test.jsonl", {"question": "?", "answer": "3"})
    assert "gsm8k_test.jsonl, line 1: 'answer' has no '####'" in mistake("gsm8k", "--local", *files)
    write(gsm8k / "gsm8k_test.jsonl", {"question": "?"})
    assert "gsm8k_test.jsonl, line 1: has no 'answer' (it has question)" in mistake("gsm8k", "--local", *files)
    write(gsm8k / "gsm8k_test.jsonl", {"question": "?", "answer": None})
    assert "line 1: has nothing in 'answer' (null): fill it in, or" in mistake("gsm8k", "--local", *files)
    assert "no file for the test split" in mistake("gsm8k", "--local", files[0])
    (gsm8k / "empty").mkdir()  # no clone of the hub's repository
    line = "cannot be loaded" if find_spec("datasets") else "pip install datasets"
    assert line in mistake("gsm8k", "--local", str(gsm8k / "empty"))
    train = str(gsm8k / "gsm8k_train.jsonl")
    assert "which split is it? say train=" in mistake("gsm8k", "--local", str(write(tmp_path / "a.jsonl", {})))
    assert "has no train split; it has test" in mistake("math500", "--split", "train", "--local", train)
    assert "no data set 'gsm8'" in mistake("gsm8")
    assert "is read, not generated here" in mistake("gsm8k", "--local", *files, "--option", "a=1")
    assert "only pairs can be turned" in mistake("gsm8k", "--local", *files, "--as", "sft")
    assert "where the question goes: {question}" in mistake("gsm8k", "--local", *files, "--template", "no place")
    assert "describes your own files" in mistake("gsm8k", "--local", *files, "--answer-column", "a")
    twice = ("gsm8k", "--local", f"train={train}", f"test={train}", "--test-size", "1")
    assert "here there is one already" in mistake(*twice)
    assert "give them with --local" in mistake("custom", "--answer-column", "a", "--data-source", "s")
    assert "which column holds the right answer" in mistake("custom", "--local", train)
    one_split = ("gsm8k", "--local", f"train={train}", "--split", "train")
    assert "leaves none of 1 rows" in mistake(*one_split, "--test-size", "1")
    assert "unknown kind of file" in mistake("gsm8k", "--split", "train", "--local", str(SCRIPTS / "gsm8k.py"))
    assert "must be KEY=VALUE" in mistake("countdown", "--option", "numbers")


def test_duplicates_are_told_and_left_out_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def record(text: str) -> dict[str, str]:
        return {"question": text, "answer": "#### 1"}

    write(tmp_path / "train.jsonl", record("One?"), record("Two?"), record("ONE? "), record("Three?"))
    write(tmp_path / "test.jsonl", record("two?"), record("Four?"))
    files = [f"{split}={tmp_path / split}.jsonl" for split in ("train", "test")]
    argv = ["gsm8k", "--local", *files, "--out", str(tmp_path / "out")]
    assert main(argv) == 0
    told = capsys.readouterr().out
    assert "train: 1 rows repeat another row's prompt, kept (--drop-duplicates leaves them out)" in told
    assert "train: 1 rows have a prompt that is in test, kept" in told
    assert len(read_rows(tmp_path / "out" / "train.parquet")) == 4
    assert main([*argv, "--drop-duplicates"]) == 0
    assert "have a prompt that is in test, left out" in capsys.readouterr().out
    left = read_rows(tmp_path / "out" / "train.parquet")
    assert [r.extra_info["question"] for r in left] == ["One?", "Three?"]
    assert [r.extra_info["index"] for r in left] == [0, 1]


def test_limits_are_drawn_by_the_seed(tmp_path: Path) -> None:
    records = [{"question": f"Question {i}?", "answer": "#### 1"} for i in range(100)]
    source = write(tmp_path / "train.jsonl", *records)
    argv = ["gsm8k", "--local", str(source), "--split", "train", "--limit", "10", "--out"]
    drawn = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        main([*argv, str(tmp_path / name), "--seed", seed])
        drawn.append([r.extra_info["question"] for r in read_rows(tmp_path / name / "train.parquet")])
    order = [r["question"] for r in records]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 10 and drawn[0] == sorted(drawn[0], key=order.index)


def test_your_own_questions_from_every_kind_of_file(tmp_path: Path) -> None:
    records = [{"ask": "One?", "info": {"gold": 1}, "unit": "m"}, {"ask": "Two?", "info": {"gold": 2}, "unit": "s"}]
    write(tmp_path / "a.jsonl", *records)
    (tmp_path / "a.json").write_text(json.dumps(records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("ask,gold,unit\nOne?,1,m\nTwo?,2,s\n")
    made = []
    for kind in ("jsonl", "json", "parquet", "csv"):
        columns = ["--prompt-column", "ask", "--answer-column", "gold" if kind == "csv" else "info.gold"]
        more = ["--extra-columns", "unit", "--data-source", "valor/arithmetic", "--template", "{question} Please."]
        assert (
            main(["custom", "--local", str(tmp_path / f"a.{kind}"), *columns, *more, "--out", str(tmp_path / kind)])
            == 0
        )
        made.append(pq.read_table(tmp_path / kind / "train.parquet").to_pylist())
    assert made[0] == made[1] == made[2] == made[3]
    assert made[0][1] == {
        "data_source": "valor/arithmetic",
        "prompt": [{"role": "user", "content": "Two? Please."}],
        "ability": "custom",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 1, "unit": "s"},
    }


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("csv", "prompt,answer\nWhat is 1,000 + 1?,1001\n", "row 0: has more cells than the first line has names"),
        ("csv", "prompt,answer\n1+1?,2\n2+2?,\n", "row 1: has nothing in 'answer'"),
        ("csv", "prompt,answer\n,2\n", "row 0: has nothing in 'prompt'"),
        ("csv", "prompt,answer\r\n", "holds no rows"),
        ("jsonl", '{"prompt": "1+1?", "answer": NaN}', "line 1: has nothing in 'answer'"),
        (
            "jsonl",
            '{"prompt": "<image>?", "answer": 1, "image": "a.png"}',
            "reads the file itself, with data.image_key=image",
        ),
    ],
)
def test_cells_that_are_missing_or_too_many_are_named(tmp_path: Path, kind: str, content: str, words: str) -> None:
    (tmp_path / f"a.{kind}").write_text(content)
    argv = ["--local", str(tmp_path / f"a.{kind}"), "--answer-column", "answer", "--data-source", "mine"]
    with pytest.raises(UserError, match=words):
        main(["custom", *argv, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
def test_a_file_in_another_encoding_says_how_to_save_it(tmp_path: Path, kind: str) -> None:
    (tmp_path / f"a.{kind}").write_bytes('{"prompt": "几个"}'.encode("gbk"))
    argv = ["--local", str(tmp_path / f"a.{kind}"), "--answer-column", "answer", "--data-source", "mine"]
    with pytest.raises(UserError, match=r"is not in UTF-8: save it so .*iconv"):
        main(["custom", *argv, "--out", str(tmp_path / "out")])


def test_the_splits_of_your_own_files(tmp_path: Path) -> None:
    for name in ("a_train", "a_val"):
        write(tmp_path / f"{name}.jsonl", {"prompt": name, "answer": 1})
    argv = ["custom", "--answer-column", "answer", "--data-source", "mine", "--out", str(tmp_path / "out"), "--local"]
    assert main([*argv, f"train={tmp_path / 'a_train.jsonl'}", f"test={tmp_path / 'a_val.jsonl'}"]) == 0
    for split, text in (("train", "a_train"), ("test", "a_val")):
        assert read_rows(tmp_path / "out" / f"{split}.parquet")[0].messages[0]["content"] == text
    assert main([*argv, str(tmp_path / "a_val.jsonl")]) == 0  # one file alone is for training
    assert read_rows(tmp_path / "out" / "train.parquet")[0].messages[0]["content"] == "a_val"
    with pytest.raises(UserError, match="which split is it"):
        main([*argv, f"train={tmp_path / 'a_train.jsonl'}", f"test={tmp_path / 'a_val.jsonl'}", "b.jsonl"])


def test_your_own_messages_and_a_held_out_test_set(tmp_path: Path) -> None:
    chats = [[{"role": "system", "content": "S"}, {"role": "user", "content": f"Q{i}"}] for i in range(10)]
    source = write(tmp_path / "a.jsonl", *({"prompt": chat, "answer": ["a", "b"]} for chat in chats))
    argv = [
        "custom",
        "--local",
        str(source),
        "--answer-column",
        "answer",
        "--data-source",
        "mine",
        "--out",
        str(tmp_path),
    ]
    assert main([*argv, "--test-size", "2", "--template", "{question}!"]) == 0
    splits = [read_rows(tmp_path / f"{split}.parquet") for split in ("train", "test")]
    assert [len(rows) for rows in splits] == [8, 2]
    assert sorted(r.messages[1]["content"] for rows in splits for r in rows) == [f"Q{i}!" for i in range(10)]
    assert splits[0][0].messages[0] == {"role": "system", "content": "S"}
    assert splits[0][0].ground_truth == ["a", "b"]


def test_no_prompt_of_a_held_out_test_set_stays_in_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "q{i % 20}", "answer": "{i % 20}"}}\n' for i in range(50)))
    argv = ["custom", "--local", str(file), "--answer-column", "answer", "--data-source", "own", "--out", str(tmp_path)]
    assert main([*argv, "--test-size", "10"]) == 0
    train, test = ([row.ground_truth for row in read_rows(tmp_path / f"{name}.parquet")] for name in ("train", "test"))
    assert len(test) == 10 and train and not {*train} & {*test}
    assert "rows that repeat a prompt of test were left out" in capsys.readouterr().out


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in (*RECIPES, "custom"))


def test_reasoning_gym(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    argv = ["reasoning_gym/leg_counting", "--limit", "5", "--test-size", "2", "--out", str(tmp_path)]
    assert main([*argv, "--option", "max_animals=3"]) == 0
    rows = read_rows(tmp_path / "train.parquet")
    assert len(rows) == 5 and rows[0].data_source == "reasoning_gym/leg_counting"
    assert all(row.ground_truth.isdigit() for row in rows)
    with pytest.raises(UserError, match="does not take these --option settings"):
        main([*argv, "--option", "legs=3"])
    with pytest.raises(UserError, match="has no task 'leg'"):
        main(["reasoning_gym/leg"])


def test_real_files(shared_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = shared_dir / "data"
    gsm8k = [f"train={data / 'gsm8k_train.jsonl.gz'}", f"test={data / 'gsm8k_test.jsonl'}"]
    for name, local, options, expected in (
        ("gsm8k", gsm8k, [], {"train": 7473, "test": 1319}),
        ("math500", [data / "math500.jsonl"], [], {"test": 500}),
        ("nq", [data / "nq_open_dev.jsonl"], ["--split", "test"], {"test": 3610}),
        ("game24", [data / "game24_1362.csv"], ["--test-size", "100"], {"train": 1262, "test": 100}),
    ):
        out = tmp_path / name
        assert main([name, "--out", str(out), "--local", *map(str, local), *options]) == 0
        assert capsys.readouterr().out == "".join(f"{out}/{s}.parquet: {n} rows\n" for s, n in expected.items())
    report = load_file(str(SCRIPTS / "check.py"), "path").check_rows(tmp_path / "gsm8k" / "train.parquet", find_grader)
    assert (len(report.rows), report.exit_code) == (7473, 0), str(report)
    rows = read_rows(tmp_path / "gsm8k" / "test.parquet")
    scores = [compute_score(r.data_source, f"So it is\n#### {r.ground_truth}", r.ground_truth) for r in rows[:200]]
    assert all(s["score"] == 1.0 for s in scores)  # type: ignore[index]
    assert read_rows(tmp_path / "nq" / "test.parquet")[0].ground_truth == {
        "target": ["14 December 1972 UTC", "December 1972"]
    }


def test_a_folder_with_a_file_for_each_split(gsm8k: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the quick start says, under verl's name of the option; other files in the folder are left alone."""
    (gsm8k / "a_test.jsonl").write_text("no JSON")
    assert script("gsm8k", ["--out", str(tmp_path / "a"), "--local_dataset_path", str(gsm8k)]) == 0
    (gsm8k / "gsm8k_train.jsonl").rename(gsm8k / "train.jsonl")
    assert script("gsm8k", ["--out", str(tmp_path / "b"), "--local", str(gsm8k)]) == 0
    for split in ("train", "test"):
        assert (tmp_path / "a" / f"{split}.parquet").read_bytes() == (tmp_path / "b" / f"{split}.parquet").read_bytes()
    (gsm8k / "train.jsonl").unlink()
    assert script("gsm8k", ["--out", str(tmp_path / "c"), "--local", str(gsm8k)]) == 2
    assert "no file for the train split; give it as train=FILE" in capsys.readouterr().err
