"""A corpus and an index that finds documents in it: BM25 over words, or vectors of a neural encoder."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from valor.data.files import read_records
from valor.errors import UserError
from valor.user_files import installed

_COLUMNS = ("contents", "title", "text", "ctxs")
_BATCH = 64  # texts in one forward pass of the encoder
_MAX_TOKENS = 512  # of a text that the encoder reads
# What an encoder was trained to see before a query and before a document, by a part of its name.
_PREFIXES = {
    "e5": ("query: ", "passage: "),
    "bge": ("Represent this sentence for searching relevant passages: ", ""),
}


class Document(NamedTuple):
    """One thing found: the title in double quotes, a newline and the text, as Search-R1's corpora have it."""

    contents: str
    score: float


class Index(ABC):
    """Documents that can be searched. `search` may be called from any thread."""

    name: str
    least = float("-inf")
    """A document whose score is not above it has nothing to do with the query."""

    def __init__(self, documents: Sequence[str]) -> None:
        self.documents = documents
        self._lock = threading.Lock()

    def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """At most `topk` documents of each query, the best first."""
        if not queries:
            return []
        with self._lock:
            ids, scores = self._best(queries, min(topk, len(self.documents)))
        found = (zip(*row, strict=True) for row in zip(ids.tolist(), scores.tolist(), strict=True))
        return [[Document(self.documents[int(i)], s) for i, s in row if s > self.least] for row in found]

    @abstractmethod
    def _best(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of documents [Q, k] and their scores [Q, k], falling."""


class BM25Index(Index):
    """Words in common, weighted by how rare they are (Lucene's BM25, k1 1.5, b 0.75, English stop words left out)."""

    name = "bm25"
    least = 0.0  # of a document without a word of the query

    def __init__(self, documents: Sequence[str]) -> None:
        super().__init__(documents)
        self._bm25s = installed("bm25s", "searching by words needs bm25s", "'valor-rl[agents]'")
        words = self._words(documents)
        if not any(words.ids):
            raise UserError("the corpus has no word of two letters to search by")
        self._bm25 = self._bm25s.BM25()
        self._bm25.index(words, show_progress=False)

    def _best(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        words = self._words(queries, return_ids=False)  # the numbers of words are those of the documents' vocabulary
        found = self._bm25.retrieve(words, k=k, show_progress=False)
        return found.documents, found.scores

    def _words(self, texts: Sequence[str], *, return_ids: bool = True) -> Any:
        return self._bm25s.tokenize(list(texts), stopwords="en", return_ids=return_ids, show_progress=False)


class EmbeddingIndex(Index):
    """Mean hidden states of a Hugging Face encoder, normalised; the exact inner product decides."""

    def __init__(self, documents: Sequence[str], model: str) -> None:
        import torch

        from valor.models.load import load_encoder, load_tokenizer

        super().__init__(documents)
        self.name = model
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer = load_tokenizer(model, path_key="--embeddings")
        self._encoder = load_encoder(model).to(self._device)
        self._max_tokens = min(_MAX_TOKENS, self._tokenizer.model_max_length)
        folder = Path(model).name.lower()
        self._before_query, before = next((p for part, p in _PREFIXES.items() if part in folder), ("", ""))
        self._vectors = self._encode([before + text for text in documents])

    def _best(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        scores, ids = (self._encode([self._before_query + text for text in queries]) @ self._vectors.T).topk(k)
        return ids.cpu().numpy(), scores.cpu().numpy()

    def _encode(self, texts: Sequence[str]) -> Any:
        """Unit vectors [texts, hidden], float32; texts of one length share a pass."""
        import torch

        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors: list[Any] = [None] * len(texts)
        for start in range(0, len(order), _BATCH):
            part = order[start : start + _BATCH]
            tokens = self._tokenizer(
                [texts[i] for i in part],
                padding=True,
                truncation=True,
                max_length=self._max_tokens,
                return_tensors="pt",
            ).to(self._device)
            with torch.inference_mode():
                states = self._encoder(**tokens).last_hidden_state
            mask = tokens["attention_mask"][..., None]
            mean = (states * mask).sum(1) / mask.sum(1)
            for i, vector in zip(part, torch.nn.functional.normalize(mean, dim=-1), strict=True):
                vectors[i] = vector
        return torch.stack(vectors)


def open_index(corpus: str | Path, *, embeddings: str | None = None) -> Index:
    """The index of a corpus; `embeddings` is the encoder's name or path, None takes BM25.

    Raises UserError for a corpus or an encoder that cannot be used.
    """
    documents = read_corpus(corpus)
    return EmbeddingIndex(documents, embeddings) if embeddings else BM25Index(documents)


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
    for one in passages if isinstance(passages, list) else [record]:
        found = one if isinstance(one, Mapping) else {}
        contents = found.get("contents")
        if contents is None and isinstance(found.get("text"), str):
            contents = f'"{found.get("title") or ""}"\n{found["text"]}'
        if not isinstance(contents, str):
            has = ", ".join(found) or "neither"
            raise UserError(f"{where}: a document has the text 'contents', or 'title' and 'text' (this has {has})")
        yield contents
