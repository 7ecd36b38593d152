"""What HTTP servers of Valor share: bounded requests, keys, refusals of one line, and listening sockets."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from valor.arguments import option
from valor.errors import UserError
from valor.user_files import installed

if TYPE_CHECKING:
    from starlette.requests import Request

MAX_CONNECTIONS = 1024
_MAX_BYTES = 16 * 2**20  # of a request
_BODY_SECONDS = 30.0  # in which a request has to arrive


class Refused(Exception):
    """A request is refused with a status, and one line that says why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def require_libraries() -> None:
    """UserError where the libraries of servers are not installed."""
    for library in ("starlette", "uvicorn"):
        installed(library, "a server needs starlette and uvicorn", "'valor-rl[agents]'")


def uvicorn_server(app: Any, **settings: Any) -> Any:
    """A server of the application, with `settings` of uvicorn beside, or in place of, those that ours have."""
    import uvicorn

    settings = {"log_level": "warning", "lifespan": "off", "limit_concurrency": MAX_CONNECTIONS} | settings
    config = uvicorn.Config(app, timeout_keep_alive=60, **settings)  # longer than agents think between two requests
    return uvicorn.Server(config)


def authorise(request: Request, api_key: str | None) -> None:
    """Refused unless the request brings the key as a bearer token; None admits every request."""
    token = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if api_key is not None and not hmac.compare_digest(token.encode(), api_key.encode()):
        raise Refused(401, "the key is missing or wrong: send it as a bearer token")


async def read_object(request: Request) -> dict[str, Any]:
    """The request's JSON object. Refused: it is none, too long, or too slow, or the client has gone."""
    from starlette.requests import ClientDisconnect

    body = b""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise Refused(413, f"the request has more than {_MAX_BYTES} bytes")
    except TimeoutError:
        raise Refused(408, f"the request did not arrive within {_BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise Refused(499, "the client has gone") from None
    return parse_object(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request's body. Refused: it is none."""
    try:
        value = json.loads(body)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refused(400, "the request holds half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the request is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refused(400, "the request must be a JSON object")
    return value


def address_options(function: Callable[..., int]) -> Callable[..., int]:
    """The options of a command that serves: --port, --host, --api-key-env."""
    key = option("--api-key-env", metavar="NAME", help="Environment variable with the key of requests.")
    host = option("--host", default="127.0.0.1", help="Where to listen; this machine alone.")
    return option("--port", default=8000, help="0 takes a free one.")(host(key(function)))


def key_for(host: str, variable: str | None) -> str | None:
    """The key in the environment variable. UserError: it is not set, or none is named and other machines reach us."""
    if variable is None and not is_loopback(host):
        raise UserError(
            f"--host {host} lets other machines in: name the environment variable that holds a key for them "
            "(--api-key-env), or listen on 127.0.0.1"
        )
    if variable is not None and not os.environ.get(variable):
        raise UserError(f"--api-key-env {variable}: this environment variable is not set; put the key into it")
    return None if variable is None else os.environ[variable]


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. UserError: it cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen at {host}, port {port} ({error}): choose another") from None


def address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
