"""`valor retrieve`: Search-R1's protocol over a real socket, its limits, and a start that fails in one line."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from valor.agents.http_server import Refused, parse_object
from valor.agents.search.client import HttpRetriever, LocalRetriever, SearchFailed
from valor.agents.search.index import open_index
from valor.agents.search.server import MAX_QUERIES, MAX_TOPK, main, parse_question
from valor.errors import UserError

DOCUMENTS = [f'"City {i}"\nThe town number{i} has a river and {"big " * i}walls.' for i in range(6)]
KEY = "a secret"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "towns.jsonl"
    path.write_text("".join(json.dumps({"contents": text}) + "\n" for text in DOCUMENTS))
    return path


@pytest.fixture(scope="module")
def server(corpus: Path) -> Iterator[str]:
    """The address of a server of its own process that wants a key."""
    arguments = ["retrieve", str(corpus), "--port", "0", "--topk", "2", "--api-key-env", "TOWN_KEY"]
    process = subprocess.Popen(
        [sys.executable, "-m", "valor", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TOWN_KEY": KEY},
    )
    assert process.stdout is not None
    ready = re.match(r"(http://127\.0\.0\.1:\d+/retrieve): 6 documents, ready after", process.stdout.readline())
    assert ready, process.communicate()[1]
    yield ready[1]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and errors == "SIGINT: stopped\n"


def post(url: str, body: Any, key: str = KEY) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx2.post(url, content=content, headers={"Authorization": f"Bearer {key}"}, timeout=20)


@pytest.mark.slow
def test_search_r1_s_request_and_reply(server: str, corpus: Path) -> None:
    reply = post(server, {"queries": ["number3", "big river"], "topk": 3, "return_scores": True})
    expected = open_index(corpus).search(["number3", "big river"], 3)
    wanted = [[{"document": {"contents": d.contents}, "score": d.score} for d in row] for row in expected]
    assert reply.status_code == 200 and reply.json() == {"result": wanted}
    assert [len(row) for row in wanted] == [1, 3]


@pytest.mark.slow
def test_without_scores_there_are_documents_alone(server: str) -> None:
    assert post(server, {"queries": ["number3"]}).json() == {"result": [[{"contents": DOCUMENTS[3]}]]}
    assert len(post(server, {"queries": ["river"], "topk": None}).json()["result"][0]) == 2
    assert post(server, {"queries": []}).json() == {"result": []}


@pytest.mark.slow
def test_skyrl_s_request(server: str) -> None:
    reply = post(server, {"query": "number1", "topk": 1, "return_scores": True}).json()
    assert reply["result"][0][0]["document"] == {"contents": DOCUMENTS[1]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        ([], 400, "object"),
        ({}, 400, "queries"),
        ({"queries": "one"}, 400, "queries: Input should be a valid list"),
        ({"queries": [1]}, 400, "queries.0: Input should be a valid string"),
        ({"queries": ["\ud800"]}, 400, "no text"),
        ({"queries": ["a"], "topk": 0}, 400, "topk"),
        ({"queries": ["a"], "topk": MAX_TOPK + 1}, 400, "topk"),
        ({"queries": ["a"], "topk": True}, 400, "topk"),
        ({"queries": ["a"], "return_scores": "yes"}, 400, "return_scores"),
        ({"queries": ["a"] * (MAX_QUERIES + 1)}, 400, "at most 8192 items"),
        ({"queries": ["a" * 10_001]}, 400, "at most 10000 characters"),
        (b" " * (16 * 2**20 + 1), 413, "bytes"),
    ],
)
def test_what_is_not_answered_is_one_line(server: str, body: Any, status: int, words: str) -> None:
    reply = post(server, body)
    assert reply.status_code == status
    assert words in reply.json()["error"] and "\n" not in reply.json()["error"]


@pytest.mark.slow
def test_a_search_needs_the_key_and_the_right_method(server: str) -> None:
    assert post(server, {"queries": ["a"]}, key="guess").status_code == 401
    assert httpx2.post(server, json={"queries": ["a"]}).status_code == 401
    for path, reply in (
        ("/retrieve", httpx2.get(server)),
        ("/", httpx2.post(server.removesuffix("retrieve"), json={})),
    ):
        assert reply.status_code == (405 if path == "/retrieve" else 404)
        assert f"{path} is not served: only POST /retrieve" in reply.json()["error"]
    health = httpx2.get(server.replace("/retrieve", "/health")).json()
    assert health == {"status": "ok", "documents": 6}


@pytest.mark.slow
def test_the_client_is_answered_as_in_this_process(server: str, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOWN_KEY", KEY)
    here = LocalRetriever(open_index(corpus), topk=2)
    there = HttpRetriever(server, topk=2, api_key_env="TOWN_KEY")
    queries = [[f"number{i % 6}", "river"] for i in range(100)]

    async def ask(retriever: Any) -> list[Any]:
        return await asyncio.gather(*(retriever.retrieve(one) for one in queries))

    assert asyncio.run(ask(here)) == asyncio.run(ask(there))
    without_key = HttpRetriever(server, topk=2)
    with pytest.raises(SearchFailed, match="status 401"):
        asyncio.run(without_key.retrieve(["river"]))


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_no_request_is_more_than_refused(body: bytes) -> None:
    try:
        question = parse_question(parse_object(body))
    except Refused as refusal:
        assert refusal.status == 400 and "\n" not in str(refusal)
    else:
        assert question.topk is None or 1 <= question.topk <= MAX_TOPK


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere.jsonl"], ["/nowhere.jsonl", "no such file"]),
        (["CORPUS", "--host", "0.0.0.0"], ["0.0.0.0", "--api-key-env"]),
        (["CORPUS", "--api-key-env", "NO_SUCH_VARIABLE"], ["NO_SUCH_VARIABLE", "not set"]),
        (["CORPUS", "--port", "TAKEN"], ["port", "cannot listen"]),
        (["CORPUS", "--port", "70000"], ["70000", "cannot listen"]),
        (["CORPUS", "--host", "no.such.host.invalid", "--api-key-env", "HOME"], ["no.such.host", "cannot listen"]),
    ],
)
def test_a_start_that_fails_is_one_line(arguments: list[str], words: list[str], corpus: Path) -> None:
    pytest.importorskip("bm25s")
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"CORPUS": str(corpus), "TAKEN": str(taken.getsockname()[1])}
        port = [] if "--port" in arguments else ["--port", "0"]
        with pytest.raises(UserError) as error:
            main([values.get(argument, argument) for argument in arguments] + port)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


@pytest.mark.parametrize("topk", ["0", "101", "many"])
def test_topk_has_bounds(topk: str, corpus: Path) -> None:
    with pytest.raises(UserError, match="--topk"):
        main([str(corpus), "--topk", topk])
