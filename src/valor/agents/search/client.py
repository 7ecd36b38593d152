"""What agents ask: a search server that may be slow, down or wrong, or an index in this process."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx2

from valor.agents.search.index import Document, Index, open_index
from valor.errors import UserError
from valor.http_client import Server


class SearchFailed(Exception):
    """A search without an answer. The text is one line for the agent; the run goes on."""


class HttpRetriever:
    """Asks a server that speaks Search-R1's protocol (`valor retrieve`, Search-R1's own, SkyRL's).

    At most `max_concurrent` requests are under way. One that gets no connection, no reply within `timeout` seconds, or
    status 408, 409, 429 or 5xx, is sent again up to `retries` times, with growing pauses. The key in the environment
    variable `api_key_env` is sent as a bearer token.
    """

    def __init__(
        self,
        url: str,
        *,
        topk: int = 3,
        timeout: float = 30.0,
        retries: int = 3,
        max_concurrent: int = 32,
        api_key_env: str | None = None,
    ) -> None:
        try:
            is_address = httpx2.URL(url).scheme in ("http", "https") and bool(httpx2.URL(url).host)
        except httpx2.InvalidURL:
            is_address = False
        if not is_address:
            raise UserError(f"'{url}' is no address of a search server; http://127.0.0.1:8000/retrieve is one")
        self.url, self.topk, self._timeout, self._attempts = url, topk, timeout, retries + 1
        self._server = Server(url, api_key_env=api_key_env, max_concurrent=max_concurrent)

    async def retrieve(self, queries: Sequence[str]) -> list[list[Document]]:
        """The documents of each query, the best first. Raises SearchFailed."""
        # Scores are always requested: without them Search-R1's own server fails.
        body = json.dumps({"queries": list(queries), "topk": self.topk, "return_scores": True})
        post = self._server.post(self.url, body, seconds=self._timeout, attempts=self._attempts)
        try:
            reply = await asyncio.wrap_future(self._server.submit(post))
        except (TimeoutError, RuntimeError) as error:
            raise SearchFailed(f"the search server does not answer ({error})") from None
        try:
            results = [[_document(entry) for entry in row] for row in reply.json()["result"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise SearchFailed("the search server's reply cannot be read") from None
        if len(results) != len(queries):
            raise SearchFailed(f"the search server answered {len(results)} of {len(queries)} queries")
        return results


class LocalRetriever:
    """An index in this process."""

    def __init__(self, index: Index, *, topk: int = 3) -> None:
        self.index, self.topk = index, topk

    async def retrieve(self, queries: Sequence[str]) -> list[list[Document]]:
        """The documents of each query, the best first."""
        return await asyncio.to_thread(self.index.search, queries, self.topk)


def open_retriever(
    url: str | None = None, corpus: str | None = None, *, topk: int = 3, **http: Any
) -> HttpRetriever | LocalRetriever:
    """The server at `url`, or an index of the file `corpus`.

    `http`: further arguments of HttpRetriever, which an index does without. UserError: neither or both are given, or
    the one given is no good.
    """
    if url is not None and corpus is None:
        return HttpRetriever(url, topk=topk, **http)
    if corpus is not None and url is None:
        return LocalRetriever(open_index(corpus), topk=topk)
    raise UserError("search needs the address of a server (valor retrieve starts one) or a corpus file: give one")


def documents_text(documents: Sequence[Document]) -> str:
    """The documents as Search-R1 shows them to a policy: `Doc 1(Title: "title") text`, a line each."""
    return "".join(f"Doc {i}(Title: {title}) {text}\n" for i, title, text in _numbered(documents))


def results_text(results: Sequence[Sequence[Document]]) -> str:
    """The documents of several queries as verl's search tool writes them."""
    texts = ["".join(f"Doc {i} (Title: {title})\n{text}\n\n" for i, title, text in _numbered(r)) for r in results]
    return "\n---\n".join(text.strip() for text in texts)


def _numbered(documents: Sequence[Document]) -> list[tuple[int, str, str]]:
    """Number from 1, title (the first line) and text of each document."""
    parts = [document.contents.partition("\n") for document in documents]
    return [(i, title, text) for i, (title, _, text) in enumerate(parts, start=1)]


def _document(entry: Any) -> Document:
    """A document of a reply, with or without its score. KeyError, TypeError, ValueError: the entry is none."""
    contents = entry.get("document", entry)["contents"]
    contents.encode()  # half of a surrogate pair is no text, and no tokenizer takes it
    return Document(contents, float(entry.get("score") or 0.0))
