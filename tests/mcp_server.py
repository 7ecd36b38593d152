"""An MCP server for tests, by the mcp package: over standard input and output, or `python mcp_server.py PORT`."""

import os
import sys
import time

from mcp.server import MCPServer
from mcp_types import ImageContent

server = MCPServer("numbers", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def pair() -> list[str]:
    """Two texts."""
    return ["one", "two"]


@server.tool()
def fail() -> str:
    """Raise."""
    raise ValueError("no more")


@server.tool()
def end() -> str:
    """End the process."""
    os._exit(1)


@server.tool()
def sleep(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def who() -> str:
    """The process, and a variable of its environment."""
    return f"{os.getpid()} {os.environ.get('COLOUR')}"


@server.tool()
def picture() -> ImageContent:
    """An image."""
    return ImageContent(type="image", data="aGVsbG8=", mime_type="image/png")


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
