"""Tools of MCP servers (https://modelcontextprotocol.io): a command, or an address."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cache, partial
from typing import Any

import httpx2

from valor.agents.tool_runner import exception_text
from valor.agents.tool_sources import FunctionTool
from valor.agents.tools import ToolResult
from valor.errors import UserError
from valor.http_client import LoopThread, json_headers, past_proxies
from valor.user_files import installed

_START_SECONDS = 60.0  # a command may first install its server
_HTTP_LIMITS = httpx2.Timeout(30.0, read=300.0)  # seconds; a call's own limit is tool_timeout
_SESSION_LOST = (-32000, -32001, -32600)  # codes of a closed connection, and of servers that do not know the session


def mcp_tools(
    command: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    url: str | None = None,
    api_key_env: str | None = None,
) -> list[FunctionTool]:
    """The tools of one server. All episodes of a process share one session, which is opened again when it was lost.

    `command` is a program and its arguments, which speaks over its standard input and output, with `env` beside a few
    variables of ours (PATH, HOME, ...); `url` an address of streamable HTTP, which gets the key in the environment
    variable `api_key_env` as a bearer token. UserError: not one of the two, the mcp
    package is not installed, or the server does not answer.
    """
    installed("mcp", "tools of MCP servers need the mcp package", "'valor-rl[agents]'")
    if bool(command) == bool(url) or isinstance(command, str) or (env and url) or (api_key_env and command):
        raise UserError(
            "an MCP server is command: [program, arguments], with env: {...} if it needs one, or url, with api_key_env"
        )
    variables = tuple((name, str(value)) for name, value in (env or {}).items())
    connection = _connection(tuple(map(str, command or ())), variables, url, api_key_env)
    try:
        server, tools = connection.submit(connection.tools()).result(_START_SECONDS)
    except Exception as error:
        reason = f"no answer within {_START_SECONDS:g} s" if isinstance(error, TimeoutError) else _reason(error)
        raise UserError(f"the MCP server {url or ' '.join(command or ())}: {reason}") from None
    schemas = [{"name": t.name, "description": t.description or "", "parameters": t.input_schema} for t in tools]
    return [
        FunctionTool(partial(connection.call, schema["name"]), {"type": "function", "function": schema}, server=server)
        for schema in schemas
    ]


class _Connection(LoopThread):
    """A session with a server, in a thread and on an event loop of its own: those of episodes come and go."""

    _opened: asyncio.Future[Any]  # the client of the session

    def __init__(self, target: Any, api_key_env: str | None = None) -> None:
        super().__init__()
        self._target, self._api_key_env = target, api_key_env
        self._session: asyncio.Task[None] | None = None
        self._client: Any = None
        self._lost, self._opening = asyncio.Event(), asyncio.Lock()

    async def tools(self) -> tuple[str, list[Any]]:
        """The server's name, and all tools, page by page; on this object's loop."""
        client, tools, cursor = await self._connected(), [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return client.server_info.name, tools

    async def call(self, name: str, /, **arguments: Any) -> ToolResult:
        """A call's result, for any loop. An error is a text, and the next call opens a new session."""
        try:
            return await asyncio.wrap_future(self.submit(self._call(name, arguments)))
        except Exception as error:
            return ToolResult(f"Error: {name}: {_reason(error)}.", error="failed")

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        from mcp import MCPError

        client = await self._connected()
        try:
            answer = await client.call_tool(name, arguments)
        except Exception as error:
            answered = isinstance(error, MCPError) and error.code not in _SESSION_LOST
            if client is self._client and not answered:
                self._lost.set()
            raise
        return ToolResult(_text(answer), error="failed" if answer.is_error else None)

    async def _connected(self) -> Any:
        """The client of an open session."""
        async with self._opening:
            if self._lost.is_set() and self._session is not None:
                await asyncio.wait({self._session})
            if self._session is None or self._session.done():
                self._lost.clear()
                self._opened = self._loop.create_future()
                self._session = self._loop.create_task(self._hold(self._opened))
        # A call that gives up does not end the opening: a server may take longer to start than a call.
        self._client = await asyncio.shield(self._opened)
        return self._client

    async def _hold(self, opened: asyncio.Future[Any]) -> None:
        """Hold a session open until it is lost: one task has to enter and to leave it."""
        from mcp import Client

        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(Client(await self._transport(stack)))
                opened.set_result(client)
                await self._lost.wait()
        except Exception as error:
            if not opened.done():
                opened.set_exception(error)

    async def _transport(self, stack: AsyncExitStack) -> Any:
        """To an address: by a client that sends the key, and asks servers of this network past proxies."""
        from mcp.client.streamable_http import streamable_http_client

        if not isinstance(self._target, str):
            return self._target
        http = httpx2.AsyncClient(
            headers=json_headers(self._api_key_env), timeout=_HTTP_LIMITS, mounts=past_proxies(self._target)
        )
        return streamable_http_client(self._target, http_client=await stack.enter_async_context(http))


@cache
def _connection(
    command: tuple[str, ...], env: tuple[tuple[str, str], ...], url: str | None, api_key_env: str | None
) -> _Connection:
    from mcp import StdioServerParameters

    target = url or StdioServerParameters(command=command[0], args=list(command[1:]), env=dict(env))
    return _Connection(target, api_key_env)


def _text(answer: Any) -> str:
    """An answer's texts, addresses of resources, and structured content that its texts do not have; other parts are
    named as left out. Raises TypeError where there are only those."""
    blocks = [getattr(block, "resource", block) for block in answer.content]
    texts = [block.text for block in blocks if hasattr(block, "text")]
    parts = texts + [str(block.uri) for block in blocks if hasattr(block, "uri") and not hasattr(block, "text")]
    structured = answer.structured_content
    if structured is not None:
        values = [structured, *(structured.values() if len(structured) == 1 else ())]  # one value may stand alone
        shown = [texts, [*map(_json_or_text, texts)]]
        if not any(text in (value, [value]) for text in shown for value in values):
            parts.append(json.dumps(structured, ensure_ascii=False))
    left_out = {block.type for block in answer.content if block.type in ("image", "audio")}
    left_out |= {"a file" for block in blocks if hasattr(block, "blob")}
    kinds = ", ".join(sorted(left_out))
    if kinds and not parts:
        raise TypeError(f"it answered with {kinds}, and only text is supported")
    return "\n".join([*parts, *([f"({kinds} left out: only text is supported)"] if kinds else [])])


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _reason(error: BaseException) -> str:
    """One line. The library wraps errors into groups of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(exception_text(error).split())
