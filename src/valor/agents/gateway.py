"""An OpenAI-compatible server that remembers, by session, the very tokens that its answers consist of.

A session is one episode that somebody else plays: a program with an OpenAI client of its own. Each request is a turn.
Where its messages go on from those before, the turn continues the same tokens; where they do not, because the program
has cut or rewritten its history, the turn begins a new row.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any

from valor.agents.chat import Chat, Conversation, Message
from valor.agents.episode import Episode
from valor.agents.formats import BadCall, Format, ToolCall
from valor.agents.gateway_requests import essence, read_limit, read_messages, read_token_ids
from valor.agents.http_server import Refused, address, authorise, read_object, uvicorn_server
from valor.agents.loops import Generate, Limits, Play, Task
from valor.errors import UserError
from valor.rollout.base import Output

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger(__name__)

_STATE = ("play", "_last", "_opening", "_talk", "_known", "_tools", "_request")


class Session:
    """The turns of one episode, as they are asked for; those of one session come one after the other. What was not
    answered, or whose answer the client has not seen, has not happened.

    It lives on `loop`, by default the running one. `after_turn` is called there with the episode so far.
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
        self.play: Play | None = None
        self._last: Output | None = None
        self._after_turn = after_turn
        self._opening: Sequence[Message] = ()
        self._task, self._generate, self._chat, self._limits, self._parse = task, generate, chat, limits, parse
        self._turns = asyncio.Lock()
        self._talk: Conversation | None = None
        self._known: list[Message] = []  # the messages of the last request, and our answer
        self._tools: Sequence[Any] = ()
        self._request: Mapping[str, Any] | None = None  # the last one
        self._before: Mapping[str, Any] = {}  # the state before it
        self._answering: set[asyncio.Task[dict[str, Any]]] = set()

    def answer(self, method: str, asked: Mapping[str, Any], *, repeated: bool = False) -> Future[dict[str, Any]]:
        """What `chat` or `generate` returns, for other threads; cancelled when the episode ends before. `repeated`: the
        client says that it has sent the request before, and has seen no answer to it."""

        async def work() -> dict[str, Any]:
            me = asyncio.current_task()
            assert me is not None
            self._answering.add(me)
            try:
                if repeated and asked == self._request:
                    self.forget(self._request)
                return await getattr(self, method)(asked)
            finally:
                self._answering.discard(me)

        return asyncio.run_coroutine_threadsafe(work(), self.loop)

    def close(self) -> None:
        for task in [*self._answering]:
            task.cancel()

    def forget(self, asked: Mapping[str, Any] | None) -> None:
        """Take back the turn of a request, if it is the last one; on the session's loop."""
        if asked is self._request and asked is not None:
            vars(self).update(self._before)
            self._tell()

    @property
    def busy(self) -> bool:
        return bool(self._answering)

    def goes_on(self, asked: Mapping[str, Any]) -> bool:
        """Whether a request, its messages by `read_messages`, begins with all that was asked and answered here."""
        if "token_ids" not in asked:
            return self._knows(asked["messages"], asked.get("tools") or ())
        ids, row = asked["token_ids"], self.play.row if self.play else []
        return isinstance(ids, list) and len(ids) > len(row) > 0 and ids[: len(row)] == row

    def end(self, reward: float | None = None) -> Episode | None:
        """The episode as it is; None without a turn."""
        if self.play is None or self._last is None or not self.play.turns:
            return None
        return self.play.end(self._last.finish_reason, reward)

    async def chat(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """A chat completion. Sampling is the run's own; only the number of tokens may be lowered."""
        messages, tools = read_messages(asked), asked.get("tools") or ()
        newer = asked.get("max_completion_tokens")
        most = read_limit(asked.get("max_tokens") if newer is None else newer)
        async with self._turn_of(asked):
            self._continue(messages, tools)
            output = await self._turn(most)
            assert self._talk is not None
            text = self._talk.answer(output)
            offered = () if asked.get("tool_choice") == "none" else tools
            message, reason = self._answer(text, offered), output.finish_reason
            self._known = [*messages, message]
        if message.get("tool_calls") and reason == "stop":
            reason = "tool_calls"
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return {"object": "chat.completion", "choices": [choice], **self._facts(asked, output)}

    async def generate(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """A completion of token ids (vLLM's /inference/v1/generate)."""
        ids, most = read_token_ids(asked, len(self._chat.tokenizer))
        async with self._turn_of(asked):
            self._talk, self._known = None, []
            if self.play is not None and self.goes_on(asked):
                self._check_room(self.play.observe(ids[len(self.play.row) :]))
            else:
                self._begin(ids)
            output = await self._turn(most)
        said, reason = output.token_ids, output.finish_reason
        pairs = zip(said, output.log_probs, strict=True)
        content = [{"token": f"token_id:{token}", "logprob": log_prob} for token, log_prob in pairs]
        choice = {"index": 0, "token_ids": said, "logprobs": {"content": content}, "finish_reason": reason}
        return {"request_id": secrets.token_hex(8), "choices": [choice], **self._facts(asked, output)}

    def _continue(self, messages: list[Message], tools: Sequence[Any]) -> None:
        """Bring the episode to where the policy is to answer `messages`."""
        goes_on, known = self._knows(messages, tools), len(self._known)
        self._tools = tools
        if goes_on and self.play is not None and self._talk is not None:
            self._check_room(self.play.tell(self._talk, messages[known:]))
            return
        if tools:
            _tell_hidden_tools(self._chat)
        self._talk = Conversation(self._chat, self._chat.safe(messages), tools)
        if self.play is None:
            self._opening = messages
        self._begin(self._talk.token_ids)

    def _knows(self, messages: Sequence[Message], tools: Sequence[Any]) -> bool:
        """Whether `messages` are those of the last request, our answer, and more."""
        known = self._known
        more = self._talk is not None and tools == self._tools and len(messages) > len(known)
        return more and all(essence(one) == essence(other) for one, other in zip(messages, known, strict=False))

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        """A row with this prompt: the episode's first, or one more."""
        if self.play is None:
            self.play = Play(self._task, self._generate, self._limits, prompt_ids)
            self._check_room(self.play.room > 0)
        else:
            self._check_room(self.play.new_row(prompt_ids))

    def _check_room(self, fits: bool) -> None:
        if not fits:
            most = f"{self._limits.model} tokens in all, {self._limits.response} after a prompt"
            raise Refused(400, f"context_length_exceeded: there is no room for a further turn ({most})")

    @asynccontextmanager
    async def _turn_of(self, asked: Mapping[str, Any]) -> AsyncIterator[None]:
        """The block is the turn that answers a request, if it comes to its end."""
        async with self._turns:
            before = {name: _copied(getattr(self, name)) for name in _STATE}
            try:
                yield
            except BaseException:
                vars(self).update(before)
                raise
            self._request, self._before = asked, before
            self._tell()

    def _tell(self) -> None:
        if self._after_turn is not None and (episode := self.end()) is not None:
            self._after_turn(episode, self._opening)

    async def _turn(self, most: int | None) -> Output:
        assert self.play is not None
        self._last = await self.play.turn(most=most)
        return self._last

    def _answer(self, text: str, tools: Sequence[Any]) -> Message:
        """The message of a turn: with its calls where the request offers tools."""
        parsed = self._parse(text, tools) if tools else None
        calls = [call for call in parsed.calls if isinstance(call, ToolCall)] if parsed else []
        if parsed and parsed.calls and self.play:
            self.play.say(parsed.content)
        if parsed is None or not calls:
            return {"role": "assistant", "content": text}
        number = len(self.play.turns) if self.play else 0
        listed = [
            {
                "id": f"call_{number}_{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for i, call in enumerate(calls)
        ]
        bad = [call.text for call in parsed.calls if isinstance(call, BadCall)]
        said = "\n".join(part for part in (parsed.content, *bad) if part.strip())
        return {"role": "assistant", "content": said or None, "tool_calls": listed}

    def _facts(self, asked: Mapping[str, Any], output: Output) -> dict[str, Any]:
        prompt = len(self.play.row) - len(output.token_ids) if self.play else 0
        usage = {"prompt_tokens": prompt, "completion_tokens": len(output.token_ids)}
        usage["total_tokens"] = sum(usage.values())
        facts = {"created": int(time.time()), "model": asked.get("model") or "policy", "usage": usage}
        return {"id": f"chatcmpl-{secrets.token_hex(8)}", **facts}


class Gateway:
    """The server of one process, in a thread of its own; sessions come and go."""

    places = ("/sessions/{name}",)
    """Paths below which requests are answered."""

    def __init__(self, listening: socket.socket) -> None:
        self._sessions: dict[str, Session] = {}
        self.address = address(listening)
        self._server = uvicorn_server(self._app(), loop="asyncio")  # a thread in uvloop crashes a process that ends
        run = {"target": self._server.run, "kwargs": {"sockets": [listening]}}
        threading.Thread(**run, name="gateway", daemon=True).start()

    def add(self, session: Session) -> str:
        """Let a session be asked; returns its base URL."""
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
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        def answers(method: str) -> Any:
            async def answer(request: Request) -> Response:
                try:
                    session, asked = await self.find(request)
                    reply = await _answer_of(session, method, asked, request)
                except Refused as refusal:
                    why = str(refusal)
                    error = {"message": why, "type": "invalid_request_error", "code": why.split(":")[0]}
                    return JSONResponse({"error": error}, refusal.status)
                return _streamed(reply) if asked.get("stream") else JSONResponse(reply)

            return answer

        async def models(request: Request) -> Response:
            return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model"}]})

        paths = {"chat/completions": "chat", "inference/v1/generate": "generate"}
        routes = [
            Route(f"{place}/{prefix}{path}", answers(method), methods=["POST"])
            for path, method in paths.items()
            for prefix in ("", "v1/")
            for place in self.places
        ]
        return Starlette(routes=[*routes, *(Route(f"{place}/v1/models", models) for place in self.places)])

    async def find(self, request: Request) -> tuple[Session, dict[str, Any]]:
        """Whom a request is for, and what it asks. Refused: there is no such session, or it is not allowed."""
        session = self._sessions.get(request.path_params["name"])
        if session is None:
            raise Refused(404, "there is no such session, or it has ended")
        authorise(request, session.key)
        return session, await read_object(request)


async def _answer_of(session: Session, method: str, asked: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """Refused: the request, or its episode has ended, or the client has gone."""
    repeated = request.headers.get("x-stainless-retry-count", "0") != "0"  # sent by OpenAI's clients
    try:
        answer = asyncio.wrap_future(session.answer(method, asked, repeated=repeated))
    except RuntimeError:  # its loop is closed
        raise Refused(410, "the episode has ended") from None
    gone = asyncio.ensure_future(_client_gone(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            answer.cancel()
            with suppress(RuntimeError):
                session.loop.call_soon_threadsafe(session.forget, asked)
            raise Refused(499, "the client has gone")
        return await answer
    except asyncio.CancelledError:
        raise Refused(410, "the episode has ended") from None
    except UserError as error:  # the chat template's
        raise Refused(400, str(error)) from None
    finally:
        gone.cancel()


@cache
def _tell_hidden_tools(chat: Chat) -> None:
    if not chat.shows_tools:
        logger.warning("the chat template leaves out the tools of requests: the model never reads them")


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _copied(value: Any) -> Any:
    """A Play or a Conversation that goes on without changing this one; anything else as it is."""
    if not isinstance(value, Play | Conversation):
        return value
    made = copy(value)
    vars(made).update({name: copy(part) for name, part in vars(value).items() if isinstance(part, list | dict)})
    return made


def _streamed(reply: dict[str, Any]) -> Response:
    """The whole answer as one event: for clients that only read streams."""
    from starlette.responses import Response

    (choice,) = reply["choices"]
    delta = {"index": 0, "delta": choice["message"], "finish_reason": choice["finish_reason"]}
    if choice["message"].get("tool_calls"):
        calls = [{"index": i, **call} for i, call in enumerate(choice["message"]["tool_calls"])]
        delta["delta"] = {**choice["message"], "tool_calls": calls}
    event = {**reply, "object": "chat.completion.chunk", "choices": [delta]}
    return Response(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n", media_type="text/event-stream")
