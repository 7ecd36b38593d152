"""What the gateway is asked: requests read, and what cannot be done refused with a line that says what to do."""

import json
from collections.abc import Mapping
from typing import Any

from valor.agents.chat import Message
from valor.agents.http_server import Refused

_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
_CHAT = {"messages", "tools", "max_tokens", "max_completion_tokens"}
_TOKENS = {"token_ids", "sampling_params"}
_SAMPLING = {"max_tokens", "logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"}
_DRAWING = {"temperature", "top_p", "top_k", "min_p", "seed"}  # how tokens are drawn is the run's own
_DRAWING |= {"presence_penalty", "frequency_penalty", "repetition_penalty"}
_FREE = {*_DRAWING, "model", "stream", "stream_options"}  # all others have no part in the answer
_FREE |= {"user", "metadata", "store", "service_tier", "safety_identifier", "request_id", "priority"}
_FREE |= {"prompt_cache_key", "prompt_cache_retention", "cache_salt"}
_FREE_TEXT = "what the policy writes is not constrained"
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "must be 1: an episode has one answer a turn"),
    "tool_choice": (("auto", "none"), f'must be "auto" or "none": {_FREE_TEXT}'),
    "parallel_tool_calls": ((True,), f"must be true: {_FREE_TEXT}"),
    "response_format": (({}, {"type": "text"}), f"is not served: {_FREE_TEXT}; ask for a form in the messages"),
    "chat_template_kwargs": (({},), "is the run's own: set data.apply_chat_template_kwargs, and leave it out"),
    "add_generation_prompt": ((True,), "must be true: the policy begins a message of its own"),
    "continue_final_message": ((False,), "must be false: the policy begins a message of its own"),
    "stop": (("", []), "is not served: leave it out, and cut the answer yourself"),
}
"""Fields with the values that are served, and what to do instead of others."""
_UNKNOWN = ((False, "", [], {}), "is not served: leave it out")


def _check_fields(asked: Mapping[str, Any], served: set[str]) -> None:
    """Refused: something is asked for that would not be done."""
    for name, value in asked.items():
        values, advice = _ONLY.get(name, _UNKNOWN)
        if not (name in served or name in _FREE or value is None or value in values):
            raise Refused(400, f'"{name}" {advice}')


def read_token_ids(asked: Mapping[str, Any], size: int) -> tuple[list[int], int | None]:
    """The request's token ids, of a vocabulary of `size`, and how many the answer may have. Refused: there are none, or
    what cannot be done is asked for."""
    ids = asked.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
        raise Refused(400, '"token_ids" must be a list of whole numbers')
    if not 0 <= min(ids) <= max(ids) < size:
        raise Refused(400, f"a token id is outside the vocabulary of {size} tokens")
    if asked.get("stream"):
        raise Refused(400, '"stream" is not served with token ids: leave it out')
    params = asked.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise Refused(400, '"sampling_params" must be an object')
    _check_fields(asked, _TOKENS)
    _check_fields(params, _SAMPLING)
    return ids, read_limit(params.get("max_tokens"))


def read_limit(most: Any) -> int | None:
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
    _check_fields(asked, _CHAT)
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
        essence(message)
        found.append({**message, "content": content or ""})
    return found


def essence(message: Message) -> tuple[Any, ...]:
    """What makes two messages the same; so are None and what is left out. Refused: its tool calls are none."""
    try:
        calls = [
            (call["function"]["name"], json.loads(call["function"]["arguments"] or "{}"))
            for call in message.get("tool_calls") or ()
        ]
    except (TypeError, LookupError, ValueError, RecursionError):
        raise Refused(400, "tool_calls must be a list of functions with a name and arguments in JSON") from None
    return message["role"], message.get("content") or "", calls
