"""Reading prompt files, and what is said about bad ones."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from valor.config import DataConfig
from valor.data.files import DataRow, read_rows, write_parquet
from valor.errors import UserError


def record(text: str = "1 + 1?", truth: Any = "2", **more: Any) -> dict[str, Any]:
    return {
        "data_source": "valor/arithmetic",
        "prompt": [{"role": "user", "content": text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": 0, "split": "train"},
        **more,
    }


def jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_the_same_rows_from_every_kind_of_file(tmp_path: Path) -> None:
    records = [record("1 + 1?", "2"), record("2 + 2?", "4")]
    write_parquet({tmp_path / "a.parquet": records})
    jsonl(tmp_path / "a.jsonl", *records)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as stream:
        stream.write("\n".join(json.dumps(r) for r in records))  # no newline at the end
    (tmp_path / "a.json").write_text(json.dumps(records))
    expected = [(r["prompt"], "valor/arithmetic", t, r["extra_info"]) for r, t in zip(records, "24")]  # noqa: B905
    for name in ("a.parquet", "a.jsonl", "a.jsonl.gz", "a.json"):
        rows = read_rows(tmp_path / name)
        assert [(r.messages, r.data_source, r.ground_truth, r.extra_info) for r in rows] == expected, name
    both = read_rows([str(tmp_path / "a.json"), str(tmp_path / "a.parquet")])
    assert [r.ground_truth for r in both] == ["2", "4", "2", "4"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path, name: str) -> None:
    text = json.dumps([record("π?")] if name == "a.json" else record("π?"), ensure_ascii=False)
    opener = gzip.open if name.endswith(".gz") else open
    with opener(tmp_path / name, "wt", encoding="utf-8-sig") as stream:
        stream.write(text)
    assert read_rows(tmp_path / name)[0].messages[0]["content"] == "π?"


def test_what_pandas_writes_for_nothing_is_no_ground_truth(tmp_path: Path) -> None:
    rows = read_rows(jsonl(tmp_path / "a.jsonl", *(record(truth=t) for t in (float("nan"), None, " ", 0.0, "nan"))))
    assert [row.lacks_truth for row in rows] == [True, True, True, False, False]


def test_a_row_knows_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record()) + "\n\n" + json.dumps(record()) + "\n")
    assert [r.where for r in read_rows(path)] == [f"{path}, line 1", f"{path}, line 3"]


def test_files_with_different_extra_info_can_be_read_together(tmp_path: Path) -> None:
    write_parquet({tmp_path / "a.parquet": [record(extra_info={"index": 1})]})
    write_parquet({tmp_path / "b.parquet": [record(extra_info={"id": "x", "level": 3}, truth=["2", "two"])]})
    a, b = read_rows([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    assert (a.extra_info, b.extra_info) == ({"index": 1}, {"id": "x", "level": 3})
    assert b.ground_truth == ["2", "two"]


def test_optional_columns_and_other_names(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl",
        {"chat": [{"role": "user", "content": "?"}], "source": "s", "reward_model": {"ground_truth": 3}},
    )
    (row,) = read_rows(path, DataConfig(prompt_key="chat", reward_fn_key="source"))
    assert row == DataRow(f"{path}, line 1", [{"role": "user", "content": "?"}], "s", ground_truth=3)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_column_says_whether_a_row_thinks_and_parts_of_text_are_one_text(tmp_path: Path, kind: str) -> None:
    parts = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]
    rows = [record(prompt=[{"role": "user", "content": parts}], enable_thinking=thinks) for thinks in (True, False)]
    file = tmp_path / f"a.{kind}"
    write_parquet({file: rows}) if kind == "parquet" else jsonl(file, *rows)
    assert [row.template for row in read_rows(file)] == [{"enable_thinking": True}, {"enable_thinking": False}]
    assert read_rows(file)[0].messages == [{"role": "user", "content": "1 + 1?"}]
    jsonl(tmp_path / "b.jsonl", record(enable_thinking="no"))
    fails(tmp_path / "b.jsonl", "line 1: 'enable_thinking' must be true or false, got str ('no')")
    picture = [*parts, {"type": "image_url", "image_url": {}}]
    jsonl(tmp_path / "c.jsonl", record(prompt=[{"role": "user", "content": picture}]))
    fails(tmp_path / "c.jsonl", "line 1: 'content' of message 0 must be text, got list")


def test_null_keys_that_parquet_adds_to_messages_are_dropped(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "eve"}]
    write_parquet({tmp_path / "a.parquet": [record(prompt=messages)]})
    assert read_rows(tmp_path / "a.parquet")[0].messages == messages


def test_files_found_in_the_wild(shared_dir: Path) -> None:
    counts = {"aime24": 30, "aime25": 30, "minerva": 272}
    for name, count in counts.items():
        rows = read_rows(shared_dir / "data" / f"verlfmt_{name}.parquet")
        assert len(rows) == count
        assert all(r.messages[-1]["role"] == "user" and r.ground_truth for r in rows)


def test_files_are_written_under_names_of_text_too(tmp_path: Path) -> None:
    write_parquet({f"{tmp_path}/new/a.parquet": [record()]})
    assert [row.ground_truth for row in read_rows(tmp_path / "new" / "a.parquet")] == ["2"]


def fails(path: str | Path | list[str], *words: str) -> None:
    with pytest.raises(UserError) as error:
        read_rows(path)
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


def test_missing_empty_and_foreign_files(tmp_path: Path) -> None:
    fails(tmp_path / "no.parquet", "no.parquet", "no such file")
    fails([], "no data file given")
    fails(tmp_path, "is a folder")
    fails("s3://bucket/a.parquet", "only local files")
    fails("", "'': this is no file's name")
    fails(tmp_path / "*.parquet", "a * is not expanded")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    fails(tmp_path / "saved", "is a folder", "datasets.load_from_disk(", "saved.parquet')")
    (tmp_path / "of mine.xlsx").write_text("x")
    fails(tmp_path / "of mine.xlsx", "save it as CSV UTF-8", f"--local '{tmp_path / 'of mine.csv'}'")
    (tmp_path / "data.arrow").write_text("x")
    fails(tmp_path / "data.arrow", "datasets.Dataset.from_file(", "data.parquet')")
    (tmp_path / "a.csv").write_text("x")
    fails(tmp_path / "a.csv", "unknown kind of file", ".parquet", "valor data prepare custom --local", "a.parquet')")
    (tmp_path / "typo.jsonl").write_text('{"qestion": "1+1=", "answer": "2"}\n')
    fails(tmp_path / "typo.jsonl", "'prompt'", "it has qestion, answer", "did you mean question?")
    for name in ("a.parquet", "a.jsonl", "a.json"):
        (tmp_path / name).write_bytes(b"")
        fails(tmp_path / name, name, "the file is empty")
    (tmp_path / "b.jsonl").write_text("\n\n")
    fails(tmp_path / "b.jsonl", "holds no rows")
    pq.write_table(pa.Table.from_pylist([record()]).slice(0, 0), tmp_path / "b.parquet")
    fails(tmp_path / "b.parquet", "holds no rows")


def test_malformed_files(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 this is none PAR1")
    fails(tmp_path / "a.parquet", "not a readable parquet file")
    write_parquet({tmp_path / "b.parquet": [record(str(i)) for i in range(100)]})
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2])
    fails(tmp_path / "b.parquet", "not a readable parquet file")
    table = pa.Table.from_pylist([record()])
    pq.write_table(table.append_column("prompt", table["prompt"]), tmp_path / "i.parquet")
    fails(tmp_path / "i.parquet", "i.parquet: has two columns 'prompt': leave one of them out")
    pq.write_table(pa.Table.from_pylist([record(truth=b"2")]), tmp_path / "j.parquet")
    fails(tmp_path / "j.parquet", "j.parquet, row 0: the ground truth must be text or a number, got bytes (\"b'2'\")")
    (tmp_path / "c.jsonl").write_text(json.dumps(record()) + "\n{oops\n")
    fails(tmp_path / "c.jsonl", "c.jsonl, line 2: is not JSON")
    (tmp_path / "k.jsonl").write_text(json.dumps(record()) + "\n" + json.dumps(record())[:-1] + ', "prompt": []}\n')
    fails(tmp_path / "k.jsonl", "k.jsonl, line 2: is not JSON ('prompt' is there twice)")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(json.dumps(record()).encode())[:-9])
    fails(tmp_path / "d.jsonl.gz", "cannot be read")
    (tmp_path / "e.jsonl.gz").write_text(json.dumps(record()))
    fails(tmp_path / "e.jsonl.gz", "cannot be read")
    (tmp_path / "f.json").write_text("{}")
    fails(tmp_path / "f.json", "must hold a list of rows")
    (tmp_path / "g.jsonl").write_bytes(b"\xff\xfe{}")
    fails(tmp_path / "g.jsonl", "is not in UTF-8", "iconv")
    jsonl(tmp_path / "h.jsonl", [1, 2])
    fails(tmp_path / "h.jsonl", "line 1: a row must be a JSON object")


@pytest.mark.parametrize("name", ["prompt", "data_source", "reward_model"])
def test_a_missing_column(tmp_path: Path, name: str) -> None:
    row = record()
    del row[name]
    fails(jsonl(tmp_path / "a.jsonl", record(), row), "line 2", f"column '{name}' missing", "it has ")
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    fails(tmp_path / "a.parquet", "a.parquet", f"column '{name}' missing")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": "1 + 1?"}, "'prompt' must be a list of messages"),
        ({"prompt": []}, "empty list"),
        ({"prompt": ["hello"]}, "message 0 of 'prompt' must have 'role' and 'content'"),
        ({"prompt": [{"role": "user"}]}, "'content' of message 0 must be text, got nothing"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "'content' of message 0 must be text"),
        ({"data_source": None}, "'data_source' must be text that names a grader, got nothing"),
        ({"data_source": 3}, "'data_source' must be text"),
        ({"reward_model": "42"}, "'reward_model' must be"),
        ({"extra_info": "x"}, "'extra_info' must be a dictionary"),
    ],
)
def test_a_value_of_the_wrong_type(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    fails(jsonl(tmp_path / "a.jsonl", record(), record(**change)), "a.jsonl, line 2", words)


@pytest.mark.parametrize(
    "column",
    [
        '"prompt": [{"role": "user", "content": "a HALF"}]',
        '"extra_info": {"deep": [{"a": ["HALF"]}]}',
        '"x": {"HALF": 1}',
    ],
)
@pytest.mark.parametrize("half", [b"\\ud83d", b"\\udE00", "\ud83d".encode(errors="surrogatepass")])
def test_half_of_a_surrogate_pair_is_told_with_row_and_column(tmp_path: Path, column: str, half: bytes) -> None:
    name = column[1 : column.index(":") - 1]
    others = {key: value for key, value in record().items() if key != name}
    line = json.dumps(others)[:-1].encode() + b", " + column.encode().replace(b"HALF", half) + b"}"
    (tmp_path / "a.jsonl").write_bytes(json.dumps(record()).encode() + b"\n" + line + b"\n")
    fails(tmp_path / "a.jsonl", "a.jsonl, line 2", f"'{name}' has half of a surrogate pair")
    (tmp_path / "b.jsonl").write_bytes(line.replace(half, b"\\ud83d\\ude00"))
    assert len(read_rows(tmp_path / "b.jsonl")) == 1


def test_half_of_a_pair_in_json_text_and_in_parquet(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": '{"q": "\\ud83d"}'}}
    chat = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    fails(jsonl(tmp_path / "a.jsonl", record(prompt=chat)), "a.jsonl, line 1", "'prompt' has half of a surrogate pair")
    fails(jsonl(tmp_path / "b.jsonl", record(tools='[{"name": "\\ud83d"}]')), "line 1", "'tools' has half of a")
    texts = pa.array([b"fine", "\ud83d".encode(errors="surrogatepass")], pa.binary())
    broken = pa.StringArray.from_buffers(2, texts.buffers()[1], texts.buffers()[2])
    table = pa.Table.from_pylist([record(), record()])
    pq.write_table(
        table.set_column(table.column_names.index("data_source"), "data_source", broken), tmp_path / "c.parquet"
    )
    fails(tmp_path / "c.parquet", "c.parquet, row 1", "'data_source' has bytes that are no text")


def test_writing_replaces_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.parquet"
    with pytest.raises(UserError, match="no rows"):
        write_parquet({path: []})
    with pytest.raises(UserError, match="mixes types"):
        write_parquet({path: [record(truth=1), record(truth="1")]})
    with pytest.raises(UserError, match=r"column 'extra_info' .* too large .*: make it text"):
        write_parquet({path: [record(extra_info={"n": 10**30})]})
    assert not path.exists()
    # A key that only later rows have is kept.
    write_parquet({path: [record(), record(level=3)]})
    assert pq.read_table(path)["level"].to_pylist() == [None, 3]
    assert [p.name for p in path.parent.iterdir()] == ["a.parquet"]
