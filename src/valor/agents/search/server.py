"""`valor retrieve CORPUS`: Search-R1's `POST /retrieve` over a corpus of your own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from valor.agents.http_server import (
    Refused,
    address,
    address_options,
    authorise,
    key_for,
    listen,
    read_object,
    require_libraries,
    uvicorn_server,
)
from valor.agents.search.index import Index, open_index
from valor.arguments import PATH, command, option

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

MAX_TOPK = 100  # documents of a query
MAX_QUERIES = 8192  # in a request; Search-R1 sends those of a whole batch at once
MAX_CHARACTERS = 10_000  # of a query


def parse_question(asked: Mapping[str, Any], default_topk: int) -> tuple[list[str], int, bool]:
    """Search-R1's {"queries": [text], "topk": number | null, "return_scores": bool}, or SkyRL's "query": text.

    Returns the three. Raises Refused for anything else, and for what is over the limits.
    """
    queries: Any = asked["queries"] if "queries" in asked else [asked.get("query")]
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise Refused(400, '"queries" must be a list of texts, or "query" a text')
    if len(queries) > MAX_QUERIES:
        raise Refused(413, f"{len(queries)} queries in a request; at most {MAX_QUERIES} are answered")
    if (longest := max(map(len, queries), default=0)) > MAX_CHARACTERS:
        raise Refused(413, f"a query of {longest} characters; at most {MAX_CHARACTERS} are read")
    topk = default_topk if asked.get("topk") is None else asked["topk"]
    if type(topk) is not int or not 1 <= topk <= MAX_TOPK:
        raise Refused(400, f'"topk" must be a whole number from 1 to {MAX_TOPK}')
    return_scores = asked.get("return_scores", False)
    if not isinstance(return_scores, bool):
        raise Refused(400, '"return_scores" must be true or false')
    return queries, topk, return_scores


def make_app(index: Index, *, topk: int = 3, api_key: str | None = None) -> Starlette:
    """The application: `POST /retrieve` with Search-R1's reply, and `GET /health`. Refusals are {"error": one line}.

    `topk` for requests that name none. With `api_key` every search needs it as a bearer token.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def retrieve(request: Request) -> JSONResponse:
        try:
            authorise(request, api_key)
            queries, most, with_scores = parse_question(await read_object(request), topk)
        except Refused as refusal:
            return JSONResponse({"error": str(refusal)}, refusal.status)
        found = await run_in_threadpool(index.search, queries, most)
        result = [[{"document": {"contents": d.contents}, "score": d.score} for d in row] for row in found]
        if not with_scores:
            result = [[one["document"] for one in row] for row in result]
        return JSONResponse({"result": result})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "index": index.name, "documents": len(index.documents)})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health)])


@command("retrieve", "valor retrieve corpus.jsonl --port 8000", "search")
@click.argument("corpus", type=PATH)
@address_options
@option(
    "--topk",
    type=click.IntRange(1, MAX_TOPK),
    default=3,
    help="Documents, where a request names no number.",
)
@option("--embeddings", metavar="MODEL", help="An encoder, such as intfloat/e5-base-v2, in place of BM25.")
def main(corpus: Path, port: int, host: str, api_key_env: str | None, topk: int, embeddings: str | None) -> int:
    """Serve Search-R1's POST /retrieve over documents, until a signal ends it.

    CORPUS: jsonl(.gz), json or parquet with `contents`, or `title` and `text`, in each row.
    """
    api_key = key_for(host, api_key_env)
    require_libraries()
    listening = listen(host, port)
    began = time.perf_counter()
    index = open_index(corpus, embeddings=embeddings)
    app = make_app(index, topk=topk, api_key=api_key)
    seconds = time.perf_counter() - began
    ready = f"{len(index.documents):,} documents by {index.name}, ready after {seconds:.1f} s"
    print(f"{address(listening)}/retrieve: {ready}", flush=True)
    uvicorn_server(app, timeout_graceful_shutdown=5).run(sockets=[listening])
    return 0
