"""Tools of real MCP servers, in a toolbox: answers, errors, servers that end, and mistakes in the configuration."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml

pytest.importorskip("mcp")
from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from json_http import JsonHandler
from valor.agents.formats import ToolCall
from valor.agents.mcp_tools import _Connection, _connection, _text, mcp_tools
from valor.agents.tool_files import load_sources
from valor.agents.tool_sources import function_source
from valor.agents.tools import Toolbox, ToolResult, Toolset, name_of
from valor.config.rollout import MultiTurnConfig
from valor.errors import UserError

SERVER = Path(__file__).parents[2] / "mcp_server.py"


@pytest.fixture(scope="module")
def toolset(tmp_path_factory: pytest.TempPathFactory) -> Toolset:
    path = tmp_path_factory.mktemp("tools") / "tools.yaml"
    config = {"command": [sys.executable, str(SERVER)], "env": {"COLOUR": "red"}}
    path.write_text(yaml.safe_dump({"tools": [{"class_name": "mcp", "config": config}]}))
    return Toolset(load_sources(str(path)), MultiTurnConfig(tool_timeout=5.0))


def call(toolset: Toolset, name: str, **arguments: Any) -> ToolResult:
    """A call in an episode of its own, on an event loop of its own."""

    async def play() -> ToolResult:
        toolbox = Toolbox(toolset)
        await toolbox.open({})
        result = await toolbox.call(ToolCall(name, arguments))
        await toolbox.close()
        return result

    return asyncio.run(play())


def test_schemas_are_the_servers(toolset: Toolset) -> None:
    add = next(schema for schema in toolset.schemas if name_of(schema) == "add")
    assert add["function"]["description"] == "Add two numbers."
    assert set(add["function"]["parameters"]["required"]) == {"a", "b"}
    assert call(toolset, "add", a=1).error == "arguments"


def test_answers_are_texts(toolset: Toolset) -> None:
    assert call(toolset, "add", a=1, b=2).text == "3"
    assert call(toolset, "pair").text == "one\ntwo"
    assert call(toolset, "who").text.endswith(" red")


def test_episodes_share_a_session(toolset: Toolset) -> None:
    assert call(toolset, "who").text == call(toolset, "who").text


def test_what_goes_wrong_is_a_text(toolset: Toolset) -> None:
    failed = call(toolset, "fail")
    assert failed.error == "failed" and "fail" in failed.text
    shown = call(toolset, "picture")
    assert shown.error == "failed" and "answered with image" in shown.text


def test_a_server_that_has_ended_is_started_again(toolset: Toolset) -> None:
    before = call(toolset, "who").text
    assert call(toolset, "end") == ToolResult(
        "Error: end: MCPError: Connection closed.", error="failed", seconds=pytest.approx(0, abs=5)
    )
    assert call(toolset, "add", a=2, b=2).text == "4"
    assert call(toolset, "who").text != before


def test_a_call_that_takes_too_long_holds_up_no_later_one(toolset: Toolset) -> None:
    impatient = Toolset(toolset.sources, MultiTurnConfig(tool_timeout=0.5))
    assert call(impatient, "sleep", seconds=3.0).error == "timeout"
    assert call(toolset, "add", a=2, b=3).text == "5"


def test_servers_with_tools_of_one_name_are_used_together(tmp_path: Path) -> None:
    def server(colour: str) -> dict[str, Any]:
        command = [sys.executable, str(SERVER)]
        return {"class_name": "mcp", "config": {"command": command, "env": {"COLOUR": colour}}}

    config, functions = tmp_path / "tools.yaml", tmp_path / "functions.py"
    config.write_text(yaml.safe_dump({"tools": [server("red"), server("blue")]}))
    functions.write_text(
        "from valor.agents import function_tool\n\n"
        "@function_tool\ndef who() -> str:\n    'Say.'\n    return 'a function'\n"
    )
    toolset = Toolset(load_sources(str(config), str(functions)), MultiTurnConfig(tool_timeout=5.0))
    said = {name: call(toolset, name).text.split(" ")[-1] for name in ("numbers_who", "numbers2_who", "who")}
    assert said == {"numbers_who": "red", "numbers2_who": "blue", "who": "function"}
    alone = Toolset(load_sources(function_tool_path=str(functions)))
    assert [*map(name_of, alone.schemas)] == ["who"]


TEXT = TextContent(type="text", text="the number is 42")
PICTURE = ImageContent(type="image", data="aGk=", mime_type="image/png")
NOTE = EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///n", text="noted"))
FILE = EmbeddedResource(type="resource", resource=BlobResourceContents(uri="file:///b", blob="aGk="))
LINK = ResourceLink(type="resource_link", uri="file:///l", name="log")


@pytest.mark.parametrize(
    ("content", "structured", "said"),
    [
        ([TEXT], {"found": [42]}, 'the number is 42\n{"found": [42]}'),
        ([], {"found": [42]}, '{"found": [42]}'),
        ([TextContent(type="text", text='{ "found": [42] }')], {"found": [42]}, '{ "found": [42] }'),
        ([TEXT], {"result": "the number is 42"}, "the number is 42"),
        ([TextContent(type="text", text=one) for one in "12"], {"result": [1, 2]}, "1\n2"),
        ([TextContent(type="text", text="5 of 15")], {"answer": 5}, '5 of 15\n{"answer": 5}'),
        ([TEXT, PICTURE], None, "the number is 42\n(image left out: only text is supported)"),
        ([PICTURE], {"found": [42]}, '{"found": [42]}\n(image left out: only text is supported)'),
        ([NOTE, LINK], None, "noted\nfile:///l"),
        ([TEXT, FILE], None, "the number is 42\nfile:///b\n(a file left out: only text is supported)"),
        ([], None, ""),
    ],
)
def test_an_answer_is_all_that_a_text_can_say(content: list[Any], structured: Any, said: str) -> None:
    assert _text(CallToolResult(content=content, structured_content=structured)) == said


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)])
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def test_a_server_at_an_address(address: str) -> None:
    toolset = Toolset([function_source(mcp_tools(url=address))])
    assert call(toolset, "add", a=3, b=4).text == "7"
    assert call(toolset, "fail").error == "failed"
    assert call(toolset, "add", a=4, b=4).text == "8"


def test_a_server_of_this_network_is_asked_past_a_proxy(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    _connection.cache_clear()
    assert call(Toolset([function_source(mcp_tools(url=address))]), "add", a=3, b=4).text == "7"


class Locked(JsonHandler):
    """Refuses everything, and remembers the keys that came with it."""

    keys: ClassVar[set[str | None]] = set()

    def do_POST(self) -> None:
        self.keys.add(self.headers["Authorization"])
        self.reply(401, {})


def test_a_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBERS_KEY", "secret")
    http = ThreadingHTTPServer(("127.0.0.1", 0), Locked)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        with pytest.raises(UserError, match="the MCP server http://127"):
            mcp_tools(url=f"http://127.0.0.1:{http.server_port}/mcp", api_key_env="NUMBERS_KEY")
    finally:
        http.shutdown()
        http.server_close()
    assert Locked.keys == {"Bearer secret"}


def test_a_session_that_a_restarted_server_does_not_know_is_opened_again() -> None:
    from mcp import MCPError

    opened = []

    class Restarted(_Connection):
        async def _hold(self, opening):
            opened.append(self)
            of_an_earlier_server = len(opened) == 1

            async def call_tool(name, arguments):
                if of_an_earlier_server:
                    raise MCPError(-32600, "Session not found")
                return SimpleNamespace(content=[], structured_content={"n": 1}, is_error=False)

            opening.set_result(SimpleNamespace(call_tool=call_tool))
            await self._lost.wait()

    connection = Restarted("http://unused")
    assert [asyncio.run(connection.call("n")).error for _ in range(3)] == ["failed", None, None]
    assert len(opened) == 2
    connection.close()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "command: \\[program, arguments\\]"),
        ({"command": []}, "command: \\[program, arguments\\]"),
        ({"command": ["sleep", "60"]}, r"the MCP server sleep 60: no answer within 0\.5 s"),
        ({"command": "uvx server"}, "command: \\[program, arguments\\]"),
        ({"command": ["/no/such/program"]}, "No such file"),
        ({"command": [sys.executable, "-c", "pass"]}, "Connection closed"),
        ({"url": "http://127.0.0.1:9/mcp"}, "connection attempts failed"),
        ({"urls": "x"}, "unexpected keyword argument 'urls'"),
    ],
)
def test_a_server_that_cannot_be_had_is_told(
    tmp_path: Path, config: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "60" in config.get("command", ()):
        monkeypatch.setattr("valor.agents.mcp_tools._START_SECONDS", 0.5)
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": [{"class_name": "mcp", "config": config}]}))
    with pytest.raises(UserError, match=said):
        load_sources(str(path))


def test_a_server_brings_its_own_schemas(tmp_path: Path) -> None:
    schema = {"type": "function", "function": {"name": "add"}}
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": [{"class_name": "mcp", "config": {}, "tool_schema": schema}]}))
    with pytest.raises(UserError, match="drop tool_schema"):
        load_sources(str(path))


def test_a_server_that_starts_slowly_is_opened_once():
    """A call that gives up waiting leaves the session to the next one: else a start longer than a call never ends."""
    import mcp  # noqa: F401  # not in the time of a call

    opened, ready = [], asyncio.Event()

    class Slow(_Connection):
        async def _hold(self, opening):
            opened.append(opening)
            await ready.wait()
            answer = SimpleNamespace(content=[], structured_content={"n": len(opened)}, is_error=False)
            opening.set_result(SimpleNamespace(call_tool=lambda *_: asyncio.sleep(0, answer)))
            await self._lost.wait()

    async def play():
        connection = Slow("anywhere")
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(connection.call("f"), 0.2)
        connection._loop.call_soon_threadsafe(ready.set)
        results = [await asyncio.wait_for(connection.call("f"), 60) for _ in range(2)]
        connection.close()
        return [result.text for result in results]

    assert asyncio.run(play()) == ['{"n": 1}'] * 2 and len(opened) == 1
