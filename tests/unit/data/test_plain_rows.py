"""Files of questions and answers, read as the rows of prompt files."""

import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from valor.config import DataConfig
from valor.data.files import count_rows, read_rows
from valor.errors import UserError

USER = [{"role": "user", "content": "1+1="}]


def written(folder, kind: str, rows: list[dict]):
    file = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows) if kind == "jsonl" else json.dumps(rows))
    return file


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    ("row", "source", "truth", "extra"),
    [
        ({"question": "1+1=", "answer": "2"}, "own", "2", {"answer": "2"}),
        ({"prompt": USER, "solution": "2", "level": 3}, "own", "2", {"solution": "2", "level": 3}),
        ({"problem": "1+1=", "ground_truth": "2"}, "own", "2", {}),
        ({"prompt": "1+1=", "data_source": "gsm8k", "answer": "2"}, "gsm8k", "2", {"answer": "2"}),
        ({"prompt": "1+1="}, "own", None, {}),
        ({"prompt": json.dumps(USER), "answer": "2"}, "own", "2", {"answer": "2"}),
    ],
)
def test_usual_names_of_columns_are_understood(tmp_path, kind, row, source, truth, extra):
    file = written(tmp_path, kind, [row] * 3)
    rows = read_rows(file)
    assert len(rows) == count_rows(file) == 3
    assert (rows[2].messages, rows[2].data_source, rows[2].ground_truth) == (USER, source, truth)
    assert rows[2].extra_info == extra


def test_what_a_row_says_besides_the_question_is_read(tmp_path):
    row = {"question": "1+1=", "answer": 2, "system": "Think.", "enable_thinking": False}
    (plain,) = read_rows(written(tmp_path, "jsonl", [row]))
    assert plain.messages == [{"role": "system", "content": "Think."}, *USER]
    assert plain.template == {"enable_thinking": False}
    (whole,) = read_rows(written(tmp_path, "jsonl", [row | {"question": USER, "system": " "}]))
    assert whole.messages == USER


def test_whole_numbers_that_a_table_of_pandas_made_floats_are_whole(tmp_path):
    file = tmp_path / "a.parquet"
    pd.DataFrame({"question": ["a", "b", "c"], "answer": [2, None, 2.5]}).to_parquet(file)
    truths = [row.ground_truth for row in read_rows(file)]
    assert truths == [2, None, 2.5] and type(truths[0]) is int


def test_prompt_files_stay_what_they_are_and_others_are_told_the_way(tmp_path):
    row = {"prompt": USER, "data_source": "s", "reward_model": {"ground_truth": "2"}, "answer": "not this"}
    assert read_rows(written(tmp_path, "jsonl", [row]))[0].ground_truth == "2"
    with pytest.raises(UserError, match=r"column 'prompt', 'data_source', 'reward_model' missing .*valor data prep"):
        read_rows(written(tmp_path, "jsonl", [{"text": "x"}]))
    with pytest.raises(UserError, match="line 2: a row has no 'prompt'"):
        read_rows(written(tmp_path, "jsonl", [{"question": "x", "answer": "y"}, {"answer": "y"}]))


def test_a_name_that_was_set_is_the_only_one_and_a_bad_dictionary_is_named(tmp_path):
    row = {"prompt": "1+1=", "question": "2+2=", "answer": "4"}
    assert (
        read_rows(written(tmp_path, "jsonl", [row]), DataConfig(prompt_key="question"))[0].messages[0]["content"]
        == "2+2="
    )
    with pytest.raises(UserError, match="line 1: column 'asked', 'data_source', 'reward_model' missing"):
        read_rows(written(tmp_path, "jsonl", [row]), DataConfig(prompt_key="asked"))
    with pytest.raises(UserError, match="line 2: a row has no 'question'"):
        read_rows(
            written(tmp_path, "jsonl", [row, {"prompt": "1+1=", "answer": "2"}]), DataConfig(prompt_key="question")
        )
    with pytest.raises(UserError, match="line 1: 'extra_info' must be a dictionary or absent, got str"):
        read_rows(written(tmp_path, "jsonl", [{**row, "extra_info": "{}"}]))
