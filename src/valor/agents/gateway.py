"""An OpenAI-compatible server that remembers, by session, the very tokens that its answers consist of.

A session is one episode that somebody else plays: a program with an OpenAI client of its own. Each request is a turn.
Where its messages go on from those before, the turn continues the same tokens; where they do not, because the program
has cut or rewritten its history, the turn begins a new row.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from valor.agents.chat import Chat, Conversation, Message
from valor.agents.episode import Episode
from valor.agents.formats import Format, ToolCall
from valor.agents.http_server import Refused, address, authorise, read_object, uvicorn_server
from valor.agents.loops import Generate, Limits, Play, Task
from valor.errors import UserError
from valor.rollout.base import Output

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")


class Session:
    """The turns of one episode, as they are asked for; those of one session come one after the other.

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
        self._answering: set[asyncio.Task[dict[str, Any]]] = set()

    def answer(self, method: str, asked: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """What `chat` or `generate` returns, for other threads; cancelled when the episode ends before."""

        async def work() -> dict[str, Any]:
            me = asyncio.current_task()
            assert me is not None
            self._answering.add(me)
            try:
                return await getattr(self, method)(asked)
            finally:
                self._answering.discard(me)

        return asyncio.run_coroutine_threadsafe(work(), self.loop)

    def close(self) -> None:
        for task in [*self._answering]:
            task.cancel()

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
        return self.play.end("length" if self._last.finish_reason == "length" else "stop", reward)

    async def chat(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """A chat completion. Sampling is the run's own; only the number of tokens may be lowered."""
        messages, tools = read_messages(asked), asked.get("tools") or ()
        newer = asked.get("max_completion_tokens")
        most = _read_limit(asked.get("max_tokens") if newer is None else newer)
        async with self._turns:
            self._continue(messages, tools)
            output = await self._turn(most)
            assert self._talk is not None
            text = self._talk.answer(output)
            message, reason = self._answer(text, tools), output.finish_reason
            self._known = [*messages, message]
        if message.get("tool_calls") and reason == "stop":
            reason = "tool_calls"
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return {"object": "chat.completion", "choices": [choice], **self._facts(asked, output)}

    async def generate(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """A completion of token ids (vLLM's /inference/v1/generate)."""
        ids = asked.get("token_ids")
        if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
            raise Refused(400, '"token_ids" must be a list of whole numbers')
        size = len(self._chat.tokenizer)
        if not 0 <= min(ids) <= max(ids) < size:
            raise Refused(400, f"a token id is outside the vocabulary of {size} tokens")
        if asked.get("stream"):
            raise Refused(400, '"stream" is not served with token ids: leave it out')
        params = asked.get("sampling_params") or {}
        if not isinstance(params, dict):
            raise Refused(400, '"sampling_params" must be an object')
        most = _read_limit(params.get("max_tokens"))
        async with self._turns:
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
        self._talk = Conversation(self._chat, messages, tools)
        if self.play is None:
            self._opening = messages
        self._begin(self._talk.token_ids)

    def _knows(self, messages: Sequence[Message], tools: Sequence[Any]) -> bool:
        """Whether `messages` are those of the last request, our answer, and more."""
        known = self._known
        more = self._talk is not None and tools == self._tools and len(messages) > len(known)
        return more and all(_essence(one) == _essence(other) for one, other in zip(messages, known, strict=False))

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        """A row with this prompt: the episode's first, or one more."""
        if self.play is None:
            self.play = Play(self._task, self._generate, self._limits, prompt_ids)
            self._check_room(self.play.room > 0)
        else:
            self._check_room(self.play.new_row(prompt_ids))

    def _check_room(self, fits: bool) -> None:
        if not fits:
            self._talk, self._known = None, []  # what was refused has not been told: the next request begins anew
            most = f"{self._limits.model} tokens in all, {self._limits.response} after a prompt"
            raise Refused(400, f"context_length_exceeded: there is no room for a further turn ({most})")

    async def _turn(self, most: int | None) -> Output:
        assert self.play is not None
        self._last = await self.play.turn(most=most)
        if self._after_turn is not None and (episode := self.end()) is not None:
            self._after_turn(episode, self._opening)
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
        return {"role": "assistant", "content": parsed.content.strip() or None, "tool_calls": listed}

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
                    reply = await _answer_of(session, method, asked)
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


async def _answer_of(session: Session, method: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Refused: the request, or its episode has ended."""
    try:
        answer = session.answer(method, asked)
    except RuntimeError:  # its loop is closed
        raise Refused(410, "the episode has ended") from None
    try:
        return await asyncio.wrap_future(answer)
    except asyncio.CancelledError:
        raise Refused(410, "the episode has ended") from None
    except UserError as error:  # the chat template's
        raise Refused(400, str(error)) from None


def _read_limit(most: Any) -> int | None:
    """How many tokens an answer may have. Refused: that is no such number."""
    if most is not None and (type(most) is not int or most < 1):
        raise Refused(400, "the number of tokens must be a whole number above 0")
    return most


def read_messages(asked: Mapping[str, Any]) -> list[Message]:
    """The request's messages, text alone. Refused: there are none, or what cannot be done is asked for."""
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, '"messages" must be a list with at least one message')
    try:
        named = all(isinstance(tool["function"]["name"], str) for tool in asked.get("tools") or [])
    except (TypeError, LookupError):
        named = False
    if not named:
        raise Refused(400, '"tools" must be a list of functions with names')
    if asked.get("n") not in (None, 1):
        raise Refused(400, '"n" must be 1: an episode has one answer a turn')
    for name in ("stop", "logprobs", "logit_bias", "response_format"):
        if asked.get(name) not in (None, False, [], {}, {"type": "text"}):
            raise Refused(400, f'"{name}" is not served: leave it out')
    found: list[Message] = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in _KNOWN_ROLES:
            raise Refused(400, f"a message must be an object with one of the roles {', '.join(_KNOWN_ROLES)}")
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                raise Refused(400, "a message may have text alone")
            content = "".join(part["text"] for part in content)
        if content is not None and not isinstance(content, str):
            raise Refused(400, "the content of a message must be text")
        _essence(message)
        found.append({**message, "content": content or ""})
    return found


def _essence(message: Message) -> tuple[Any, ...]:
    """What makes two messages the same; so are None and what is left out. Refused: its tool calls are none."""
    try:
        calls = [
            (call["function"]["name"], json.loads(call["function"]["arguments"] or "{}"))
            for call in message.get("tool_calls") or ()
        ]
    except (TypeError, LookupError, ValueError, RecursionError):
        raise Refused(400, "tool_calls must be a list of functions with a name and arguments in JSON") from None
    return message["role"], message.get("content") or "", calls


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
