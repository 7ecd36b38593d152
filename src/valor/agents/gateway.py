"""An OpenAI-compatible server that records, by session, the token ids of its answers.

A session is one episode, played by a program with an OpenAI client of its own. Each request is a turn. Where its
messages continue those before, the turn continues the same tokens; where they do not, because the program has cut or
rewritten its history, the turn begins a new row.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from valor.agents.chat import Chat, Conversation, Message
from valor.agents.episode import Episode
from valor.agents.formats import BadCall, Format, Parsed, ToolCall, call_id
from valor.agents.gateway_requests import essence, read_limit, read_messages
from valor.agents.http_server import Refused, address, authorise, read_object, uvicorn_server
from valor.agents.loops import Generate, Limits, Play, Task, copied
from valor.data.templates import parts_of
from valor.errors import UserError
from valor.rollout.base import FinishReason

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger(__name__)


@dataclass
class _State:
    """An episode after the turn that answered `request`, whose messages and answer are `messages`."""

    play: Play | None = None
    talk: Conversation | None = None
    opening: Sequence[Message] = ()
    messages: Sequence[Message] = ()
    tools: Sequence[Any] = ()
    request: Mapping[str, Any] | None = None
    finish_reason: FinishReason = "stop"

    def continued_by(self, messages: Sequence[Message], tools: Sequence[Any]) -> bool:
        """Whether `messages` begin with those of this state and are more."""
        size = len(self.messages)
        more = self.talk is not None and tools == self.tools and len(messages) > size
        return more and [*map(essence, messages[:size])] == [*map(essence, self.messages)]


class Session:
    """The turns of one episode, one after the other. A request that fails, or whose client has gone before its answer,
    leaves the episode as it was.

    It lives on `loop`, by default the running one. `after_turn` is called there with the episode so far and its first
    messages.
    """

    def __init__(
        self,
        task: Task,
        generate: Generate,
        chat: Chat,
        limits: Limits,
        parse: Format,
        loop: asyncio.AbstractEventLoop | None = None,
        after_turn: Callable[[Episode, Sequence[Message]], None] | None = None,
    ) -> None:
        self.key = secrets.token_urlsafe(24)
        self.loop = loop or asyncio.get_running_loop()
        self._task, self._generate, self._chat, self._limits, self._parse = task, generate, chat, limits, parse
        self._after_turn = after_turn
        self._turns = asyncio.Lock()
        self._state, self._before = _State(), _State()  # after the last turn, and after the one before it
        self._answers: set[Future[dict[str, Any]]] = set()  # on their way
        self._asked, self._replies = Counter[int](), defaultdict[int, list[dict[str, Any]]](list)  # by `_digest`

    @property
    def play(self) -> Play | None:
        return self._state.play

    @property
    def busy(self) -> bool:
        return bool(self._answers)

    def answer(self, request: Mapping[str, Any], *, repeated: bool = False) -> Future[dict[str, Any]]:
        """The result of `chat`, for other threads; cancelled when the episode ends before."""
        answer = asyncio.run_coroutine_threadsafe(self.chat(request, repeated=repeated), self.loop)
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        return answer

    def close(self) -> None:
        for answer in [*self._answers]:
            answer.cancel()

    def forget(self, request: Mapping[str, Any] | None) -> None:
        """Remove the turn of a request, if it is the last one; on the session's loop."""
        if request is not None and request is self._state.request:
            self._state = self._before
            self._replies[_digest(request)].pop()
            self._report()

    def continued_by(self, request: Mapping[str, Any]) -> bool:
        """Whether a request, its messages by `read_messages`, begins with all requests and answers of this session."""
        return self._state.continued_by(request["messages"], request.get("tools") or ())

    def end(self, reward: float | None = None) -> Episode | None:
        """The episode as it is; None without a turn."""
        play = self._state.play
        return play.end(self._state.finish_reason, reward) if play is not None else None

    async def chat(self, request: Mapping[str, Any], *, repeated: bool = False) -> dict[str, Any]:
        """A chat completion. Sampling is the run's own; only the number of tokens may be lowered. `repeated`: the
        client has sent the request before and has seen no answer: it gets the one that was lost, if there is one."""
        messages, tools, limit = read_messages(request), request.get("tools") or (), read_limit(request)
        key = _digest(request)
        self._asked[key] += not repeated
        async with self._turns:
            if repeated and len(self._replies[key]) >= self._asked[key]:
                return self._replies[key][-1]
            state = self._state
            state = replace(state, request=request, tools=tools, play=copied(state.play), talk=copied(state.talk))
            play, talk = self._observe(state, messages)
            output = await play.turn(most=limit)
            offered = () if request.get("tool_choice") == "none" else tools
            message = self._message(play, talk.answer(output), offered)
            state.messages, state.finish_reason = [*messages, message], output.finish_reason
            self._before, self._state = self._state, state
            self._report()
        reason = "tool_calls" if message.get("tool_calls") and output.finish_reason == "stop" else output.finish_reason
        total, completion = len(play.row), len(output.token_ids)
        reply = {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.get("model") or "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
            "usage": {"prompt_tokens": total - completion, "completion_tokens": completion, "total_tokens": total},
        }
        self._replies[key].append(reply)
        return reply

    def _observe(self, state: _State, messages: list[Message]) -> tuple[Play, Conversation]:
        """Advance the episode of `state` to where the policy is to answer `messages`. Refused: there is no room, or
        the chat template leaves out a message of the program's."""
        play, talk = state.play, state.talk
        parts = parts_of([messages]) - {"thoughts"}  # which templates drop on purpose
        _check_parts(self._chat, parts | ({"tools"} if state.tools else set()))
        if play is not None and talk is not None and self._state.continued_by(messages, state.tools):
            fits = play.tell(talk, messages[len(state.messages) :])
        else:
            talk = Conversation(self._chat, self._chat.safe(messages), state.tools)
            if play is None:
                play, state.opening = Play(self._task, self._generate, self._limits, talk.token_ids), messages
                fits = play.room > 0
            else:
                fits = play.new_row(talk.token_ids)
        if not fits:
            most = f"{self._limits.model} tokens in all, {self._limits.response} after a prompt"
            raise Refused(400, f"context_length_exceeded: there is no room for a further turn ({most})")
        state.play, state.talk = play, talk
        return play, talk

    def _report(self) -> None:
        if self._after_turn is not None and (episode := self.end()) is not None:
            self._after_turn(episode, self._state.opening)

    def _message(self, play: Play, text: str, tools: Sequence[Any]) -> Message:
        """The message of a turn: with its calls where the request offers tools."""
        parsed = self._parse(text, tools) if tools else Parsed([], text)
        if parsed.calls:
            play.say(parsed.content)
        calls = [call for call in parsed.calls if isinstance(call, ToolCall)]
        if not calls:
            return {"role": "assistant", "content": text}
        tool_calls = [
            {
                "id": call_id(call, len(play.turns), i),
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for i, call in enumerate(calls)
        ]
        unreadable = [call.text for call in parsed.calls if isinstance(call, BadCall)]
        content = "\n".join(part for part in (parsed.content, *unreadable) if part.strip())
        return {"role": "assistant", "content": content or None, "tool_calls": tool_calls}


class Gateway:
    """The server of one process, in a thread of its own; sessions come and go."""

    places = ("/sessions/{name}",)
    """Paths below which requests are answered."""
    most_connections: int | None = None
    """None: a run has as many as its episodes open."""

    def __init__(self, listening: socket.socket) -> None:
        self._sessions: dict[str, Session] = {}
        self.address = address(listening)
        settings = {"loop": "asyncio", "limit_concurrency": self.most_connections}
        self._server = uvicorn_server(self._app(), **settings)  # a thread in uvloop crashes a process that ends
        run = {"target": self._server.run, "kwargs": {"sockets": [listening]}}
        threading.Thread(**run, name="gateway", daemon=True).start()

    def add(self, session: Session) -> str:
        """Admit requests of a session; returns its base URL."""
        name = secrets.token_hex(8)
        self._sessions[name] = session
        return f"{self.address}/sessions/{name}/v1"

    def remove(self, base_url: str) -> None:
        """Answer no further requests of a session."""
        self._sessions.pop(base_url.split("/")[-2], None)

    def close(self) -> None:
        self._server.should_exit = True

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.responses import JSONResponse
        from starlette.routing import Mount, Route

        async def chat(http: Request) -> Response:
            try:
                session, request = await self.find(http)
                reply = await _answer(session, request, http)
            except Refused:
                raise
            except Exception as error:  # raised on, it would close the connection, and the answer could be lost
                logger.exception("a request failed")
                reason = f"the server failed: {type(error).__name__}: {error}"
                return JSONResponse({"error": {"message": reason, "type": "internal_server_error", "code": 500}}, 500)
            return _streamed(reply) if request.get("stream") else JSONResponse(reply)

        async def models(_: Request) -> Response:
            return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model"}]})

        async def refuse(_: Request, refusal: Any) -> Response:
            reason = str(refusal)
            error = {"message": reason, "type": "invalid_request_error", "code": reason.split(":")[0]}
            return JSONResponse({"error": error}, refusal.status)

        async def refuse_path(http: Request, error: Any) -> Response:
            reason = f"{http.method} {http.url.path} is not served: only POST …/v1/chat/completions and GET …/v1/models"
            return await refuse(http, Refused(error.status_code, reason))

        routes = [Route("/chat/completions", chat, methods=["POST"]), Route("/models", models)]
        mounts = [Mount(f"{place}/v1", routes=routes) for place in self.places]
        return Starlette(routes=mounts, exception_handlers={Refused: refuse, HTTPException: refuse_path})

    async def find(self, http: Request) -> tuple[Session, dict[str, Any]]:
        """The session of a request, and its JSON. Refused: there is no such session, or the key is wrong."""
        session = self._sessions.get(http.path_params["name"])
        if session is None:
            raise Refused(404, "there is no such session, or it has ended")
        authorise(http, session.key)
        return session, await read_object(http)


async def _answer(session: Session, request: Mapping[str, Any], http: Request) -> dict[str, Any]:
    """Refused: the request, or its episode has ended, or the client has gone."""
    repeated = http.headers.get("x-stainless-retry-count", "0") != "0"  # sent by OpenAI's clients
    try:
        answer = asyncio.wrap_future(session.answer(request, repeated=repeated))
    except RuntimeError:  # its loop is closed
        raise Refused(410, "the episode has ended") from None
    gone = asyncio.ensure_future(_client_gone(http))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            answer.cancel()
            with suppress(RuntimeError):
                session.loop.call_soon_threadsafe(session.forget, request)
            raise Refused(499, "the client has gone")
        return await answer
    except asyncio.CancelledError:
        raise Refused(410, "the episode has ended") from None
    except UserError as error:  # the chat template's
        raise Refused(400, str(error)) from None
    finally:
        gone.cancel()


def _digest(request: Mapping[str, Any]) -> int:
    return hash(json.dumps(request, sort_keys=True))


async def _client_gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _check_parts(chat: Chat, parts: Set[str]) -> None:
    """Refused: the template leaves out messages of a role that may tell the policy what to do. Other parts are told."""
    lost = frozenset(part for part in parts if not chat.shows(part))
    if roles := sorted(lost & {"system", "developer"}):
        raise Refused(400, f"the chat template leaves out {' and '.join(roles)} messages: send them in another role")
    _tell_lost(chat, lost)


@cache
def _tell_lost(chat: Chat, parts: Set[str]) -> None:
    if parts:
        logger.warning(
            "the chat template leaves out %s of requests: the model never reads them", ", ".join(sorted(parts))
        )


def _streamed(reply: dict[str, Any]) -> Response:
    """The answer as one event: for clients that only read streams."""
    from starlette.responses import Response

    (choice,) = reply["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    choices = [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}]
    event = {**reply, "object": "chat.completion.chunk", "choices": choices}
    return Response(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n", media_type="text/event-stream")
