"""`valor retrieve CORPUS`: Search-R1's `POST /retrieve` over a corpus of your own."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from valor.agents.http_server import (
    Refused,
    add_address,
    address,
    authorise,
    key_for,
    listen,
    read_object,
    require_libraries,
    uvicorn_server,
)
from valor.agents.search.index import Index, open_index

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

MAX_TOPK = 100  # documents of a query
MAX_QUERIES = 8192  # in a request; Search-R1 sends those of a whole batch at once
MAX_CHARACTERS = 10_000  # of a query


class Question(NamedTuple):
    """What is asked for."""

    queries: list[str]
    topk: int
    return_scores: bool


def parse_question(asked: Mapping[str, Any], default_topk: int) -> Question:
    """Search-R1's {"queries": [text], "topk": number | null, "return_scores": bool}, or SkyRL's "query": text.

    Raises Refused for anything else, and for what is over the limits.
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
    return Question(queries, topk, return_scores)


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
            question = parse_question(await read_object(request), topk)
        except Refused as refusal:
            return JSONResponse({"error": str(refusal)}, refusal.status)
        found = await run_in_threadpool(index.search, question.queries, question.topk)
        result = [[{"document": {"contents": d.contents}, "score": d.score} for d in row] for row in found]
        if not question.return_scores:
            result = [[one["document"] for one in row] for row in result]
        return JSONResponse({"result": result})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "index": index.name, "documents": len(index.documents)})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health)])


def main(argv: list[str]) -> int:
    """`valor retrieve`: make the index, then serve until a signal ends it."""
    args = _parser().parse_args(argv)
    api_key = key_for(args.host, args.api_key_env)
    require_libraries()
    listening = listen(args.host, args.port)
    began = time.perf_counter()
    index = open_index(args.corpus, embeddings=args.embeddings, folder=args.index)
    app = make_app(index, topk=args.topk, api_key=api_key)
    seconds = time.perf_counter() - began
    ready = f"{len(index.documents):,} documents by {index.name}, ready after {seconds:.1f} s"
    print(f"{address(listening)}/retrieve: {ready}", flush=True)
    uvicorn_server(app, timeout_graceful_shutdown=5).run(sockets=[listening])
    return 0


def _topk(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_TOPK:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to {MAX_TOPK}, got {text}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="valor retrieve",
        description="Serve Search-R1's POST /retrieve over a corpus: jsonl(.gz), json or parquet with `contents`, or "
        "`title` and `text`, in each row.",
    )
    add: Any = parser.add_argument
    add("corpus", type=Path, metavar="CORPUS", help="the file with the documents")
    add_address(parser)
    add("--topk", type=_topk, default=3, help="documents for requests that name no number (default 3)")
    add("--embeddings", metavar="MODEL", help="a Hugging Face encoder, such as intfloat/e5-base-v2, in place of BM25")
    add("--index", type=Path, metavar="DIR", help="keep the index there, and read it from there the next time")
    return parser
