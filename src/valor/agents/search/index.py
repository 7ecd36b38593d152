"""A corpus, and an index that finds its documents by their words."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from valor.data.files import read_records
from valor.errors import UserError
from valor.user_files import installed

_COLUMNS = ("contents", "title", "text", "ctxs")


class Document(NamedTuple):
    """A search result: the title in double quotes, a newline and the text, as Search-R1's corpora have it."""

    contents: str
    score: float


class Index:
    """BM25 (Lucene's, k1 1.5, b 0.75, English stop words left out). `search` may be called from any thread."""

    def __init__(self, documents: Sequence[str]) -> None:
        self.documents = documents
        self._bm25s = installed("bm25s", "searching by words needs bm25s", "'valor-rl[agents]'")
        words = self._words(documents)
        if not any(words.ids):
            raise UserError("the corpus has no word of two letters to search by")
        self._bm25, self._lock = self._bm25s.BM25(), Lock()
        self._bm25.index(words, show_progress=False)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """At most `topk` documents of each query, the best first; none without a word of the query."""
        if not queries:
            return []
        words: Any = self._words(queries, return_ids=False)  # word numbers are those of the documents' vocabulary
        with self._lock:
            ids, scores = self._bm25.retrieve(words, k=min(topk, len(self.documents)), show_progress=False)
        rows = zip(ids.tolist(), scores.tolist(), strict=True)
        return [[Document(str(self.documents[i]), s) for i, s in zip(*row, strict=True) if s > 0] for row in rows]

    def _words(self, texts: Sequence[str], *, return_ids: bool = True) -> Any:
        return self._bm25s.tokenize(list(texts), stopwords="en", return_ids=return_ids, show_progress=False)


@cache
def open_index(corpus: str | Path) -> Index:
    """The index of a corpus, made once in a process. Raises UserError for one that cannot be used."""
    return Index(read_corpus(corpus))


def read_corpus(path: str | Path) -> list[str]:
    """The different documents of a jsonl, json or parquet file, in its order.

    A row is a document (`contents`, or `title` and `text`) or has some (`ctxs`: a list of `title` and `text`).
    UserError: a row with neither, or no document at all.
    """
    rows = read_records(path, optional=_COLUMNS)
    documents = list(dict.fromkeys(text for where, record in rows for text in _documents(record, where)))
    if not documents:
        raise UserError(f"{path}: holds no documents")
    return documents


def _documents(record: Mapping[str, Any], where: str) -> Iterator[str]:
    passages = record.get("ctxs")
    for passage in passages if isinstance(passages, list) else [record]:
        fields = passage if isinstance(passage, Mapping) else {}
        contents = fields.get("contents")
        if contents is None and isinstance(fields.get("text"), str):
            contents = f'"{fields.get("title") or ""}"\n{fields["text"]}'
        if not isinstance(contents, str):
            has = ", ".join(fields) or "neither"
            raise UserError(f"{where}: a document has the text 'contents', or 'title' and 'text' (this has {has})")
        yield contents
