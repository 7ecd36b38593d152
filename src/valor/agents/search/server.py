"""`valor retrieve CORPUS`: Search-R1's `POST /retrieve` over a corpus of your own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from pydantic import BaseModel, Field, ValidationError

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


class Question(BaseModel, strict=True):
    """Search-R1's request."""

    queries: Annotated[list[Annotated[str, Field(max_length=MAX_CHARACTERS)]], Field(max_length=MAX_QUERIES)]
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)] | None = None
    return_scores: bool = False


def parse_question(body: Mapping[str, Any]) -> Question:
    """Search-R1's request, or SkyRL's with "query": text. Raises Refused for anything else."""
    try:
        return Question.model_validate({"queries": [body.get("query")], **body})
    except ValidationError as error:
        first = error.errors()[0]
        raise Refused(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def make_app(index: Index, *, topk: int = 3, api_key: str | None = None) -> Starlette:
    """The application: `POST /retrieve` with Search-R1's reply, and `GET /health`. Refusals are {"error": one line}.

    `topk` for requests that name none. With `api_key` every search needs it as a bearer token.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def retrieve(request: Request) -> JSONResponse:
        authorise(request, api_key)
        question = parse_question(await read_object(request))
        rows = await run_in_threadpool(index.search, question.queries, question.topk or topk)
        result: Any = [[{"document": {"contents": d.contents}, "score": d.score} for d in row] for row in rows]
        if not question.return_scores:
            result = [[entry["document"] for entry in row] for row in result]
        return JSONResponse({"result": result})

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "documents": len(index.documents)})

    async def refuse(_: Request, refusal: Any) -> JSONResponse:
        return JSONResponse({"error": str(refusal)}, refusal.status)

    async def refuse_path(request: Request, error: Any) -> JSONResponse:
        reason = f"{request.method} {request.url.path} is not served: only POST /retrieve and GET /health"
        return await refuse(request, Refused(error.status_code, reason))

    routes = [Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes, exception_handlers={Refused: refuse, HTTPException: refuse_path})


@command("retrieve", "valor retrieve corpus.jsonl --port 8000", "search")
@click.argument("corpus", type=PATH)
@address_options
@option("--topk", type=click.IntRange(1, MAX_TOPK), default=3, help="Documents, where a request names no number.")
def main(corpus: Path, port: int, host: str, api_key_env: str | None, topk: int) -> int:
    """Serve Search-R1's POST /retrieve over documents, until a signal ends it.

    CORPUS: jsonl(.gz), json or parquet with `contents`, or `title` and `text`, in each row.
    """
    api_key = key_for(host, api_key_env)
    require_libraries()
    listening = listen(host, port)
    began = time.perf_counter()
    index = open_index(corpus)
    app = make_app(index, topk=topk, api_key=api_key)
    seconds = time.perf_counter() - began
    print(f"{address(listening)}/retrieve: {len(index.documents):,} documents, ready after {seconds:.1f} s", flush=True)
    uvicorn_server(app, timeout_graceful_shutdown=5).run(sockets=[listening])
    return 0
