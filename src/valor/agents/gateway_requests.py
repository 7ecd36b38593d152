"""Requests to the gateway: fields that cannot be served are refused with a line that says what to do."""

import json
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from valor.agents.chat import Message
from valor.agents.http_server import Refused
from valor.data.messages import with_calls

_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
_SERVED = {"messages", "tools", "max_tokens", "max_completion_tokens"}
_DRAWING = {"temperature", "top_p", "top_k", "min_p", "seed"}  # how tokens are drawn is the run's own
_DRAWING |= {"presence_penalty", "frequency_penalty", "repetition_penalty"}
_FREE = {*_DRAWING, "model", "stream", "stream_options"}  # all others have no part in the answer
_FREE |= {"user", "metadata", "store", "service_tier", "safety_identifier", "request_id", "priority"}
_FREE |= {"prompt_cache_key", "prompt_cache_retention", "cache_salt"}
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "response_format": ({}, {"type": "text"}),
    "add_generation_prompt": (True,),
}
"""The values of fields of which one alone is served."""
_OFF = (False, "", [], {})
_ADVICE = {"chat_template_kwargs": "set data.apply_chat_template_kwargs of the run", "stop": "cut the answer yourself"}


def read_limit(request: Mapping[str, Any]) -> int | None:
    """The most tokens of the answer. Refused: that is no such number."""
    newer = request.get("max_completion_tokens")
    limit = request.get("max_tokens") if newer is None else newer
    if limit is not None and (type(limit) is not int or limit < 1):
        raise Refused(400, "the number of tokens must be a whole number above 0")
    return limit


def read_messages(request: Mapping[str, Any]) -> list[Message]:
    """The request's messages, text alone. Refused: there are none, or a field is not served."""
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, '"messages" must be a list with at least one message')
    try:
        named = all(isinstance(tool["function"]["name"], str) for tool in request.get("tools") or [])
    except (TypeError, LookupError):
        named = False
    if not named:
        raise Refused(400, '"tools" must be a list of functions with names')
    for name, value in request.items():
        if not (name in _SERVED or name in _FREE or value is None or value in _ONLY.get(name, _OFF)):
            raise Refused(400, f'"{name}": this value is not served: {_ADVICE.get(name, "leave it out")}')
    return _in_order([*map(_read_message, messages)])


def _in_order(messages: list[Message]) -> list[Message]:
    """The results of tools in the order of the calls whose ids they have: templates show no ids."""
    ordered: list[Message] = []
    ids: list[Any] = []
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        run = [*group]
        if are_results and all(result.get("tool_call_id") in ids for result in run):
            run.sort(key=lambda result: ids.index(result.get("tool_call_id")))
        ids = [call.get("id") for call in run[-1].get("tool_calls") or ()]
        ordered += run
    return ordered


def _read_message(message: Any) -> Message:
    if not isinstance(message, dict) or message.get("role") not in _KNOWN_ROLES:
        raise Refused(400, f"a message must be an object with one of the roles {', '.join(_KNOWN_ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refused(400, "a message may have text alone")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise Refused(400, "the content of a message must be text")
    essence(message)
    return with_calls({**message, "content": content or ""}, "the request", "messages")


def essence(message: Message) -> tuple[Any, ...]:
    """Two messages with the same essence are the same. Refused: its tool calls are none."""
    try:
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        pairs = [(function["name"], function["arguments"]) for function in functions]
        calls = [(name, json.loads(text or "{}") if isinstance(text, str | None) else text) for name, text in pairs]
    except (TypeError, LookupError, ValueError, RecursionError):
        raise Refused(400, "tool_calls must be a list of functions with a name and arguments in JSON") from None
    return message["role"], message.get("content") or "", calls
