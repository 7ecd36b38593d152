"""The search client and verl's tool before servers that are down, slow, busy or talk nonsense."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from json_http import JsonHandler
from valor import http_client
from valor.agents.builtin_tools import make_search
from valor.agents.chat import Chat
from valor.agents.formats import ToolCall
from valor.agents.loops import Limits, LoopContext
from valor.agents.search.client import (
    Document,
    HttpRetriever,
    LocalRetriever,
    SearchFailed,
    documents_text,
    open_retriever,
    results_text,
)
from valor.agents.search_loop import SearchLoop
from valor.agents.tool_files import load_sources
from valor.agents.tool_sources import function_source
from valor.agents.tools import Toolbox, ToolResult, Toolset
from valor.config import load
from valor.config.rollout import MultiTurnConfig
from valor.errors import UserError
from valor.lab.arithmetic import make_tokenizer

PARIS = {"document": {"contents": '"Paris"\nThe capital\nof France.'}, "score": 2.5}
ROME = {"document": {"contents": '"Rome"\nThe capital of Italy.'}, "score": 1.5}
Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class FakeServer:
    """A search server whose replies a test decides; remembers requests and how many ran at once."""

    def __init__(self) -> None:
        self.answer: Answer = lambda asked: (200, {"result": [[PARIS, ROME] for _ in asked["queries"]]})
        self.requests: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        fake = self

        class Handler(JsonHandler):
            def do_POST(self) -> None:
                asked = self.request_json()
                with fake.lock:
                    fake.requests.append(asked)
                    fake.at_once += 1
                    fake.most_at_once = max(fake.most_at_once, fake.at_once)
                try:
                    status, body = fake.answer(asked)
                finally:
                    with fake.lock:
                        fake.at_once -= 1
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/retrieve"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(http_client, "_FIRST_PAUSE", 0.01)
    fake = FakeServer()
    yield fake
    fake.http.shutdown()
    fake.http.server_close()


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address where nobody listens."""
    monkeypatch.setattr(http_client, "_FIRST_PAUSE", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"http://127.0.0.1:{closed.getsockname()[1]}/retrieve"


def ask(url: str, queries: list[str], **options: Any) -> list[list[Document]]:
    return asyncio.run(HttpRetriever(url, **options).retrieve(queries))


def failure(url: str, **options: Any) -> str:
    with pytest.raises(SearchFailed) as error:
        ask(url, ["capital"], **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_queries_of_one_call_are_one_request(server: FakeServer) -> None:
    found = ask(server.url, ["a", "b"], topk=2)
    paris, rome = Document(PARIS["document"]["contents"], 2.5), Document(ROME["document"]["contents"], 1.5)
    assert found == [[paris, rome], [paris, rome]]
    assert server.requests == [{"queries": ["a", "b"], "topk": 2, "return_scores": True}]


def test_a_server_inside_the_network_is_asked_past_the_proxy(
    server: FakeServer, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", nobody)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert len(ask(server.url, ["a"], retries=0)) == 1
    assert http_client.ask("GET", server.url, api_key_env=None, timeout=5.0).status_code == 501
    urls = ["http://10.1.2.3:1/v1", "http://[::1]:1", "https://8.8.8.8/v1", "http://only-the-proxy.invalid/v1"]
    assert [*http_client.past_proxies(*urls)] == ["all://10.1.2.3", "all://[::1]"]


def test_documents_without_scores_are_understood(server: FakeServer) -> None:
    server.answer = lambda asked: (200, {"result": [[PARIS["document"]]]})
    assert ask(server.url, ["a"]) == [[Document(PARIS["document"]["contents"], 0.0)]]


def test_a_busy_server_is_asked_again(server: FakeServer) -> None:
    good = server.answer
    statuses = iter([500, 429, 503])
    server.answer = lambda asked: (next(statuses, 200), b"busy") if len(server.requests) < 4 else good(asked)
    assert len(ask(server.url, ["a"], retries=3)[0]) == 2
    assert len(server.requests) == 4


def test_what_a_server_refuses_is_not_asked_again(server: FakeServer) -> None:
    server.answer = lambda asked: (400, b"no such index\nat all")
    assert "status 400: no such index at all" in failure(server.url)
    assert len(server.requests) == 1


def test_attempts_end(server: FakeServer) -> None:
    server.answer = lambda asked: (500, b"Internal Server Error")
    assert "status 500: Internal Server Error" in failure(server.url, retries=2)
    assert len(server.requests) == 3


def test_nobody_listens(nobody: str) -> None:
    assert "does not answer (ConnectError" in failure(nobody, retries=1)


def test_a_slow_server_costs_its_time_limit_and_no_more(server: FakeServer) -> None:
    server.answer = lambda asked: (time.sleep(2), (200, {"result": [[]]}))[1]
    start = time.perf_counter()
    assert "no reply within 0.1 s" in failure(server.url, timeout=0.1, retries=1)
    assert time.perf_counter() - start < 1.5


NONSENSE = (
    *(b"", b"<html>", b"[]", b"null", b"{}", b"\xff" * 100, b"[" * 10_000),
    *(b'{"result": null}', b'{"result": 3}', b'{"result": [3]}', b'{"result": [[3]]}'),
    *(b'{"result": [[{"document": {}}]]}', b'{"result": [[{"document": {"contents": null}}]]}'),
    *(b'{"result": [[{"contents": "x", "score": "high"}]]}', b'{"result": [[{"contents": "\\ud800"}]]}'),
    *(b'{"result": []}', b'{"result": [[], []]}'),
)


@pytest.mark.parametrize("body", NONSENSE)
def test_a_reply_that_makes_no_sense(server: FakeServer, body: bytes) -> None:
    server.answer = lambda asked: (200, body)
    assert any(words in failure(server.url) for words in ("cannot be read", "of 1 queries"))


def test_requests_under_way_are_bounded_and_a_slow_one_holds_up_nobody(server: FakeServer) -> None:
    good, others_done = server.answer, threading.Event()

    def answer(asked: dict[str, Any]) -> tuple[int, Any]:
        if asked["queries"] == ["slow"]:
            assert others_done.wait(60), "the others wait for the slow one"
        time.sleep(0.01)
        return good(asked)

    server.answer = answer
    retriever = HttpRetriever(server.url, max_concurrent=4)

    async def everything() -> None:
        slow = asyncio.ensure_future(retriever.retrieve(["slow"]))
        await asyncio.gather(*(retriever.retrieve([f"q{i}"]) for i in range(40)))
        others_done.set()
        await slow

    asyncio.run(everything())
    assert server.most_at_once <= 4


def test_a_search_that_is_given_up_leaves_the_next_ones_alone(server: FakeServer) -> None:
    good = server.answer
    server.answer = lambda asked: (time.sleep(0.3 if asked["queries"] == ["slow"] else 0), good(asked))[1]
    retriever = HttpRetriever(server.url, max_concurrent=1)

    async def both() -> int:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(retriever.retrieve(["slow"]), 0.05)
        return len(await retriever.retrieve(["next"]))

    assert asyncio.run(both()) == 1


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host/retrieve", "http://", "http://[::1/retrieve"])
def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(UserError, match="no address of a search server"):
        HttpRetriever(url)


def test_texts_are_those_of_search_r1_and_verl() -> None:
    found = [Document(PARIS["document"]["contents"], 2.5), Document("no title", 1.0)]
    assert documents_text(found) == 'Doc 1(Title: "Paris") The capital\nof France.\nDoc 2(Title: no title) \n'
    first = 'Doc 1 (Title: "Paris")\nThe capital\nof France.\n\nDoc 2 (Title: no title)'
    assert results_text([found, found[:1]]) == f'{first}\n---\nDoc 1 (Title: "Paris")\nThe capital\nof France.'
    assert documents_text([]) == ""


def call(tool: Callable[..., Any], *queries: str) -> ToolResult:
    return asyncio.run(tool(list(queries)))


def test_the_loop_of_search_r1_waits_for_a_reply_as_long_as_tool_timeout_says() -> None:
    keys = ["do_search=true", "actor_rollout_ref.rollout.multi_turn.tool_timeout=7", "retriever.url=http://a/retrieve"]
    loop = SearchLoop(LoopContext(load(keys).config, Chat(make_tokenizer()), Limits(100, 1000)))
    assert isinstance(loop._retriever, HttpRetriever) and loop._retriever._timeout == 7


def test_verl_s_configuration_of_the_tool(server: FakeServer) -> None:
    config = {"retrieval_service_url": server.url, "topk": 5, "default_timeout": 3, "num_workers": 7, "rate_limit": 9}
    tool = make_search(**config, enable_global_rate_limit=True)
    result = call(tool, "a")
    doc = 'Doc 1 (Title: "Paris")\nThe capital\nof France.\n\nDoc 2 (Title: "Rome")\nThe capital of Italy.'
    assert json.loads(result.text) == {"result": doc}
    assert (result.reward, result.error) == (0.0, None)
    assert server.requests[0]["topk"] == 5
    server.answer = lambda asked: (200, {"result": [[]]})
    assert json.loads(call(tool, "a").text) == {"result": "No search results found."}


@pytest.mark.parametrize("queries", [None, "a", [1]])
def test_a_wrong_call_is_told_and_counted(server: FakeServer, queries: Any) -> None:
    async def episode() -> ToolResult:
        toolbox = Toolbox(Toolset([function_source([make_search(url=server.url)])]))
        await toolbox.open({})
        return await toolbox.call(ToolCall("search", {} if queries is None else {"query_list": queries}))

    assert asyncio.run(episode()).error == "arguments"
    assert not server.requests


def test_a_server_that_is_down_is_told_and_counted(nobody: str) -> None:
    result = call(make_search(url=nobody, retries=0), "a")
    assert json.loads(result.text)["result"].startswith("Search error: the search server does not answer")
    assert (result.reward, result.error) == (0.0, "failed")


@pytest.mark.parametrize("name", ["search", "verl.tools.search_tool.SearchTool"])
def test_a_tools_file_as_verl_has_it_and_rows_as_they_are_prepared(
    name: str, server: FakeServer, tmp_path: Path
) -> None:
    file = tmp_path / "tools.yaml"
    config = {"type": "native", "retrieval_service_url": server.url, "topk": 1}
    file.write_text(json.dumps({"tools": [{"class_name": name, "config": config}]}))  # JSON is yaml
    create = {"ground_truth": {"target": ["x"]}, "question": "?", "data_source": "searchR1_nq"}
    row = {"extra_info": {"need_tools_kwargs": True, "tools_kwargs": {"search": {"create_kwargs": create}}}}
    server.answer = lambda asked: (400, b"no") if asked["queries"] == ["bad"] else (200, {"result": [[PARIS]]})

    async def episode() -> list[ToolResult]:
        toolbox = Toolbox(
            Toolset(load_sources(tool_config_path=str(file)), MultiTurnConfig(max_tool_response_length=200))
        )
        await toolbox.open(row)
        queries = (["capital"], ["bad"], "capital")
        results = [await toolbox.call(ToolCall("search", {"query_list": query})) for query in queries]
        assert await toolbox.rewards() is None
        await toolbox.close()
        return results

    good, refused, wrong = asyncio.run(episode())
    assert json.loads(good.text)["result"].startswith('Doc 1 (Title: "Paris")') and good.error is None
    assert "status 400: no" in refused.text and refused.error == "failed"
    assert wrong.error == "arguments"


@pytest.mark.parametrize("config", [{}, {"url": "http://h/retrieve", "corpus": "c"}, {"url": "http://h/r", "top_k": 3}])
def test_a_tool_s_wrong_configuration_is_one_line(config: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(json.dumps({"tools": [{"class_name": "search", "config": config}]}))
    with pytest.raises(UserError, match=r"give one|unexpected keyword argument 'top_k'"):
        load_sources(tool_config_path=str(file))


def test_a_corpus_is_searched_in_this_process_by_one_index(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"title": "Oslo", "text": "Capital of Norway"}))
    tool = make_search(corpus=str(path), topk=1)
    assert json.loads(call(tool, "norway").text)["result"] == 'Doc 1 (Title: "Oslo")\nCapital of Norway'
    first, second = open_retriever(corpus=str(path)), open_retriever(corpus=str(path), topk=5)
    assert isinstance(first, LocalRetriever) and isinstance(second, LocalRetriever)
    assert first.index is second.index and (first.topk, second.topk) == (3, 5)
