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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

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
_T = TypeVar("_T")
AfterTurn = Callable[[Episode, Sequence[Message]], None]


@dataclass
class _State:
    """An episode after a turn: `request` was answered by `output`; `messages` are the request's and the answer."""

    play: Play | None = None
    opening: Sequence[Message] = ()
    talk: Conversation | None = None
    messages: Sequence[Message] = ()
    tools: Sequence[Any] = ()
    request: Mapping[str, Any] | None = None
    output: Output | None = None

    def continues(self, messages: Sequence[Message], tools: Sequence[Any]) -> bool:
        """Whether `messages` begin with those of this state and are more."""
        more = self.talk is not None and tools == self.tools and len(messages) > len(self.messages)
        return more and [*map(essence, messages[: len(self.messages)])] == [*map(essence, self.messages)]

    def continues_tokens(self, token_ids: Any) -> bool:
        row = self.play.row if self.play else []
        return isinstance(token_ids, list) and len(token_ids) > len(row) > 0 and token_ids[: len(row)] == row


class Session:
    """The turns of one episode, one after the other. A request that fails, or whose answer the client has not seen,
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
        after_turn: AfterTurn | None = None,
    ) -> None:
        self.key = secrets.token_urlsafe(24)
        self.loop = loop or asyncio.get_running_loop()
        self._task, self._generate, self._chat, self._limits, self._parse = task, generate, chat, limits, parse
        self._after_turn = after_turn
        self._turns = asyncio.Lock()
        self._state, self._before = _State(), _State()  # after the last turn, and after the one before it
        self._answering: set[asyncio.Task[dict[str, Any]]] = set()

    @property
    def play(self) -> Play | None:
        return self._state.play

    @property
    def busy(self) -> bool:
        return bool(self._answering)

    def answer(self, method: str, request: Mapping[str, Any], *, repeated: bool = False) -> Future[dict[str, Any]]:
        """What `chat` or `generate` returns, for other threads; cancelled when the episode ends before. `repeated`: the
        client says that it has sent the request before, and has seen no answer to it."""

        async def work() -> dict[str, Any]:
            current = asyncio.current_task()
            assert current is not None
            self._answering.add(current)
            try:
                if repeated and request == self._state.request:
                    self.forget(self._state.request)
                return await getattr(self, method)(request)
            finally:
                self._answering.discard(current)

        return asyncio.run_coroutine_threadsafe(work(), self.loop)

    def close(self) -> None:
        for task in [*self._answering]:
            task.cancel()

    def forget(self, request: Mapping[str, Any] | None) -> None:
        """Remove the turn of a request, if it is the last one; on the session's loop."""
        if request is not None and request is self._state.request:
            self._state = self._before
            self._report()

    def goes_on(self, request: Mapping[str, Any]) -> bool:
        """Whether a request, its messages by `read_messages`, begins with all requests and answers of this session."""
        if "token_ids" in request:
            return self._state.continues_tokens(request["token_ids"])
        return self._state.continues(request["messages"], request.get("tools") or ())

    def end(self, reward: float | None = None) -> Episode | None:
        """The episode as it is; None without a turn."""
        play, output = self._state.play, self._state.output
        return None if play is None or output is None else play.end(output.finish_reason, reward)

    async def chat(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A chat completion. Sampling is the run's own; only the number of tokens may be lowered."""
        messages, tools = read_messages(request), request.get("tools") or ()
        newer = request.get("max_completion_tokens")
        most = read_limit(request.get("max_tokens") if newer is None else newer)
        async with self._turns:
            state = self._next(request)
            if state.continues(messages, tools) and state.play is not None and state.talk is not None:
                self._check_room(state.play.tell(state.talk, messages[len(state.messages) :]))
            else:
                if tools:
                    _tell_hidden_tools(self._chat)
                state.talk = Conversation(self._chat, self._chat.safe(messages), tools)
                state.opening = state.opening if state.play else messages
                self._begin_row(state, state.talk.token_ids)
            output = await self._turn(state, most)
            offered = () if request.get("tool_choice") == "none" else tools
            message = self._message(state, state.talk.answer(output), offered)
            state.messages, state.tools = [*messages, message], tools
            self._commit(state)
        reason = "tool_calls" if message.get("tool_calls") and output.finish_reason == "stop" else output.finish_reason
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return {"object": "chat.completion", "choices": [choice], **_facts(state, output)}

    async def generate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A completion of token ids (vLLM's /inference/v1/generate)."""
        ids, most = read_token_ids(request, len(self._chat.tokenizer))
        async with self._turns:
            state = self._next(request)
            state.talk, state.messages = None, []
            if state.play is not None and state.continues_tokens(ids):
                self._check_room(state.play.observe(ids[len(state.play.row) :]))
            else:
                self._begin_row(state, ids)
            output = await self._turn(state, most)
            self._commit(state)
        pairs = zip(output.token_ids, output.log_probs, strict=True)
        content = [{"token": f"token_id:{token}", "logprob": log_prob} for token, log_prob in pairs]
        choice = {"index": 0, "token_ids": output.token_ids, "logprobs": {"content": content}}
        choice["finish_reason"] = output.finish_reason
        return {"request_id": secrets.token_hex(8), "choices": [choice], **_facts(state, output)}

    def _next(self, request: Mapping[str, Any]) -> _State:
        """A state to change for the turn of a request; `_commit` makes it the session's."""
        return replace(self._state, request=request, play=_copied(self._state.play), talk=_copied(self._state.talk))

    def _commit(self, state: _State) -> None:
        self._before, self._state = self._state, state
        self._report()

    def _report(self) -> None:
        if self._after_turn is not None and (episode := self.end()) is not None:
            self._after_turn(episode, self._state.opening)

    def _begin_row(self, state: _State, prompt_ids: Sequence[int]) -> None:
        """The episode's first row, or one more."""
        if state.play is None:
            state.play = Play(self._task, self._generate, self._limits, prompt_ids)
            self._check_room(state.play.room > 0)
        else:
            self._check_room(state.play.new_row(prompt_ids))

    def _check_room(self, fits: bool) -> None:
        if not fits:
            most = f"{self._limits.model} tokens in all, {self._limits.response} after a prompt"
            raise Refused(400, f"context_length_exceeded: there is no room for a further turn ({most})")

    async def _turn(self, state: _State, most: int | None) -> Output:
        assert state.play is not None
        state.output = await state.play.turn(most=most)
        return state.output

    def _message(self, state: _State, text: str, tools: Sequence[Any]) -> Message:
        """The message of a turn: with its calls where the request offers tools."""
        parsed = self._parse(text, tools) if tools else None
        if parsed is None or not parsed.calls or state.play is None:
            return {"role": "assistant", "content": text}
        state.play.say(parsed.content)
        calls = [call for call in parsed.calls if isinstance(call, ToolCall)]
        if not calls:
            return {"role": "assistant", "content": text}
        functions = ({"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)} for call in calls)
        number = len(state.play.turns)
        tool_calls = [
            {"id": f"call_{number}_{i}", "type": "function", "function": one} for i, one in enumerate(functions)
        ]
        unreadable = [call.text for call in parsed.calls if isinstance(call, BadCall)]
        content = "\n".join(part for part in (parsed.content, *unreadable) if part.strip())
        return {"role": "assistant", "content": content or None, "tool_calls": tool_calls}


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
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        def endpoint(method: str) -> Any:
            async def answer(http: Request) -> Response:
                try:
                    session, request = await self.find(http)
                    reply = await _answer_of(session, method, request, http)
                except Refused as refusal:
                    why = str(refusal)
                    error = {"message": why, "type": "invalid_request_error", "code": why.split(":")[0]}
                    return JSONResponse({"error": error}, refusal.status)
                return _streamed(reply) if request.get("stream") else JSONResponse(reply)

            return answer

        async def models(_: Request) -> Response:
            return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model"}]})

        routes = [Route(f"{place}/v1/models", models) for place in self.places]
        for path, method in (("chat/completions", "chat"), ("inference/v1/generate", "generate")):
            for place in self.places:
                routes += [Route(f"{place}{v}/{path}", endpoint(method), methods=["POST"]) for v in ("", "/v1")]
        return Starlette(routes=routes)

    async def find(self, http: Request) -> tuple[Session, dict[str, Any]]:
        """The session of a request, and its JSON. Refused: there is no such session, or the key is wrong."""
        session = self._sessions.get(http.path_params["name"])
        if session is None:
            raise Refused(404, "there is no such session, or it has ended")
        authorise(http, session.key)
        return session, await read_object(http)


async def _answer_of(session: Session, method: str, request: Mapping[str, Any], http: Request) -> dict[str, Any]:
    """Refused: the request, or its episode has ended, or the client has gone."""
    repeated = http.headers.get("x-stainless-retry-count", "0") != "0"  # sent by OpenAI's clients
    try:
        answer = asyncio.wrap_future(session.answer(method, request, repeated=repeated))
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


async def _client_gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


@cache
def _tell_hidden_tools(chat: Chat) -> None:
    if not chat.shows_tools:
        logger.warning("the chat template leaves out the tools of requests: the model never reads them")


def _copied(value: _T) -> _T:
    """A copy of a Play or a Conversation that can go on without changing the original."""
    made = copy(value)
    if value is not None:
        vars(made).update({name: copy(part) for name, part in vars(value).items() if isinstance(part, list | dict)})
    return made


def _facts(state: _State, output: Output) -> dict[str, Any]:
    total, completion = len(state.play.row) if state.play else 0, len(output.token_ids)
    usage = {"prompt_tokens": total - completion, "completion_tokens": completion, "total_tokens": total}
    model = (state.request or {}).get("model") or "policy"
    return {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": model, "usage": usage}


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
