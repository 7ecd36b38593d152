"""Corpora as they are found, and what an index finds in them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from valor.agents.search.index import open_index, read_corpus
from valor.errors import UserError

CITIES = {
    "Paris": "Paris is the capital of France and lies on the Seine.",
    "Lyon": "Lyon lies where the Rhone meets the Saone.",
    "Rome": "Rome is the capital of Italy.",
    "Bern": "The seat of the Swiss government, with many bears.",
}
CONTENTS = [f'"{title}"\n{text}' for title, text in CITIES.items()]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(
        tmp_path / "cities.jsonl", [{"id": title, "contents": c} for title, c in zip(CITIES, CONTENTS, strict=True)]
    )


def test_every_kind_of_corpus_gives_the_same_documents(tmp_path: Path, corpus: Path) -> None:
    rows = [{"title": title, "text": text} for title, text in CITIES.items()]
    titled = write(tmp_path / "titled.jsonl", [*rows, rows[0]])  # a document that occurs twice is one
    questions = write(
        tmp_path / "questions.jsonl", [{"question": "?", "ctxs": rows[:3]}, {"ctxs": []}, {"ctxs": rows[2:]}]
    )
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    table = tmp_path / "table.parquet"
    pq.write_table(pa.Table.from_pylist([{"url": "x", **row} for row in rows]), table)
    for path in (corpus, titled, questions, packed, table):
        assert read_corpus(path) == CONTENTS, path
    assert read_corpus(write(tmp_path / "untitled.jsonl", [{"text": "words"}])) == ['""\nwords']


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"contents": "a b"}, {"body": "text"}], ["line 2", "'contents'", "body"]),
        ([{"contents": 3}], ["line 1", "contents"]),
        ([{"title": "t"}], ["line 1", "'text'"]),
        ([{"ctxs": ["text"]}], ["line 1"]),
        ([{"ctxs": []}], ["no documents"]),
        ([], ["empty"]),
        ([{"contents": "a\n the"}], ["no word"]),
    ],
)
def test_a_corpus_that_cannot_be_searched_is_one_line(rows: list[Any], words: list[str], tmp_path: Path) -> None:
    if rows == [{"contents": "a\n the"}]:
        pytest.importorskip("bm25s")
    with pytest.raises(UserError) as error:
        open_index(write(tmp_path / "c.jsonl", rows))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_bm25_ranks_by_rare_words_and_finds_nothing_for_unknown_ones(corpus: Path) -> None:
    index = open_index(corpus)
    capital, seine, unknown, empty = index.search(["capital of Italy", "SEINE!", "zebra", ""], 3)
    assert [d.contents for d in capital] == [CONTENTS[2], CONTENTS[0]]
    assert capital[0].score > capital[1].score > 0
    assert [d.contents for d in seine] == [CONTENTS[0]]
    assert unknown == empty == []
    assert index.search([], 3) == []
    assert len(index.search(["capital"], 100)[0]) == 2


def test_one_query_is_answered_as_it_is_among_others(corpus: Path) -> None:
    index = open_index(corpus)
    queries = ["capital", "bears of Lyon", "where lies Rome"]
    assert index.search(queries, 2) == [index.search([query], 2)[0] for query in queries]


def test_questions_find_their_passages(shared_dir: Path) -> None:
    path = shared_dir / "data" / "corpus_nq_oracle_2655.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    index = open_index(path)
    assert len(index.documents) == 2600
    found = index.search([row["question"] for row in rows], 3)
    hits = sum(
        any(ctx["text"] in document.contents for ctx in row["ctxs"] for document in documents)
        for row, documents in zip(rows, found, strict=True)
    )
    assert hits > 0.75 * len(rows)
