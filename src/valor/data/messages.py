"""Chats in rows of all runs: messages with tool calls, and a row's arguments of the chat template."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from valor.errors import UserError

Messages = Sequence[Mapping[str, Any]]

TEMPLATE_KWARGS, _THINKS = "chat_template_kwargs", "enable_thinking"
ROW_OPTIONS = ("tools", TEMPLATE_KWARGS, _THINKS)
"""The columns with a row's own arguments of the chat template."""

_HALF = re.compile("[\ud800-\udfff]")
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_LISTED = re.compile(r"""\s*(array\()?\[\s*\{\s*["'](role|content)["']\s*:""")  # messages in JSON, or printed ones
# What roles are called elsewhere, in small letters, and what chat templates call them.
_CALLED = {"human": "user", "gpt": "assistant"}
_CALLED |= {role: role for role in ("system", "developer", "user", "assistant", "tool")}


def parse_messages(
    value: Any, where: str, name: str, text_role: str | None = None, system: Any = None, image: str | None = None
) -> list[dict[str, Any]]:
    """The column `name` of a record as messages. Text is read by `as_messages`; if there is no role, it lists some.

    A message's null fields are left out, its content in parts of text is joined, with the text `image` for each part
    {"type": "image"}, and calls are as `with_calls` has them. UserError: no list of messages with `role` and `content`.
    """
    if not isinstance(value, str) or text_role is not None or _LISTED.match(value):
        try:
            value = as_messages(value, text_role or "user", system)
        except UserError as error:
            raise UserError(f"{where}: '{name}' {error}") from None
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        accepted = "a list of messages" if text_role is None else "text, or a list of messages"
        raise UserError(
            f'{where}: \'{name}\' must be {accepted} like [{{"role": "user", "content": "..."}}], got {kind_of(value)}'
        )
    if not value:
        raise UserError(f"{where}: '{name}' is an empty list; it needs at least one message")
    messages = []
    for i, raw in enumerate(value):
        if not isinstance(raw, Mapping):
            raise UserError(f"{where}: message {i} of '{name}' must have 'role' and 'content', got {kind_of(raw)}")
        message = with_calls(_without_nulls(raw), where, name)
        if (parts := message.get("content")) and isinstance(parts, list):
            texts = [_text_of(part, image) for part in parts]
            message["content"] = parts if None in texts else "".join(filter(None, texts))
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                has = "" if key in raw else f" (it has {', '.join(map(str, raw))}: rename them)"
                if isinstance(raw.get(key), list) and "image" in str(raw[key]):
                    has = ': an image is {"type": "image"} here, and stands in the column that data.image_key names'
                raise UserError(f"{where}: '{key}' of message {i} must be text, got {kind_of(message.get(key))}{has}")
        if (usual := _CALLED.get(message["role"].lower(), message["role"])) != message["role"]:
            raise UserError(f"{where}: the role of message {i} is '{message['role']}': templates call it '{usual}'")
        messages.append(message)
    return messages


def as_messages(value: Any, role: str = "user", system: Any = None) -> Any:
    """Text as messages: those that it lists in JSON or as Python prints them, the turns of a transcript that ends with
    `Assistant:`, else one message of `role`. Messages without one of the system stand behind the text of the row's
    `system`, if it has any. Other values as they are. UserError: it lists some in another way."""
    if isinstance(value, str):
        value = _listed(value) if _LISTED.match(value) else _of_text(value, role)
    opening = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    if not (opening and isinstance(value, list)):
        return value
    roles = {message.get("role") for message in value if isinstance(message, Mapping)}
    return value if roles & {"system", "developer"} else opening + value


def _listed(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(text)
    raise UserError(f"is a list of messages as text, and not in JSON: write it with json.dumps ({text[:40]!r})")


def _of_text(text: str, role: str) -> list[dict[str, str]]:
    turns = transcript_turns(text)
    asks = role == "user" and turns[-1:] == [{"role": "assistant", "content": ""}]
    return turns[:-1] if asks else [{"role": role, "content": text}]


def transcript_turns(text: str) -> list[dict[str, str]]:
    """The turns of `Human: … \\n\\nAssistant: …` as messages; none of a text that does not begin with `Human:`."""
    first, *pieces = _TURN.split(text.lstrip())
    if first or pieces[:1] != ["Human"]:
        return []
    return [
        {"role": _ROLES[name], "content": content.strip()}
        for name, content in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def with_calls(message: Mapping[str, Any], where: str, name: str) -> dict[str, Any]:
    """A message with its `tool_calls` as templates expect them: arguments as a dictionary, where OpenAI's protocol has
    JSON text, and content beside them, if empty; no list of none, of which some templates write a text."""
    if not isinstance(message.get("tool_calls") or None, list):
        return {key: value for key, value in message.items() if key != "tool_calls" or value}
    calls = [_call(call, where, name) for call in message["tool_calls"]]
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def with_written_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of `with_calls` with the arguments of its calls as JSON text."""
    functions = ((call, call["function"]) for call in message.get("tool_calls") or ())
    calls = [
        {**c, "function": {**f, "arguments": json.dumps(f["arguments"], ensure_ascii=False)}} for c, f in functions
    ]
    return {**message, "tool_calls": calls} if calls else message


def row_options(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row's arguments of the chat template: its columns `tools` and `enable_thinking`, and the entries of
    `chat_template_kwargs`, which go before. Each may be JSON text. UserError: no list of schemas, true or false, or
    dictionary.
    """
    tools = _from_json(record.get("tools"), where, "tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(f"{where}: 'tools' must be a list of function schemas, or such a list as JSON")
    kwargs = _from_json(record.get(TEMPLATE_KWARGS), where, TEMPLATE_KWARGS) or {}
    if not isinstance(kwargs, Mapping):
        raise UserError(f"{where}: '{TEMPLATE_KWARGS}' must be a dictionary, got {kind_of(kwargs)}")
    thinks = _from_json(record.get(_THINKS), where, _THINKS)
    if thinks not in (None, 0, 1):
        raise UserError(f"{where}: '{_THINKS}' must be true or false, got {kind_of(thinks)}")
    thinking = {} if thinks is None else {_THINKS: bool(thinks)}
    return {**thinking, **_without_nulls(kwargs), **({"tools": tools} if tools else {})}


def check_text(record: Mapping[str, Any], where: str) -> None:
    """UserError: a column has half of a surrogate pair, which is no text: nothing encodes, tokenises or stores it."""
    for name, value in record.items():
        if _has_half([name, value]):
            raise UserError(
                f"{where}: {name!a} has half of a surrogate pair (half a character), which is no text: repair the row "
                "or leave it out"
            )


def drop_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of an Arrow table without the nulls in lists of dictionaries (messages, schemas): each dictionary there
    has the keys of all, and chat templates would render them."""
    return {name: _deep_without_nulls(value) if isinstance(value, list) else value for name, value in record.items()}


def kind_of(value: Any) -> str:
    """A value's type and beginning, for an error's line."""
    return "nothing" if value is None else f"{type(value).__name__} ({str(value)[:40]!r})"


def _call(call: Any, where: str, name: str) -> Any:
    """A tool call; nulls inside its arguments stay."""
    if not isinstance(call, Mapping):
        return call
    call = _without_nulls(call)
    if isinstance(function := call.get("function"), Mapping):
        arguments = _from_json(function.get("arguments") or None, where, name)
        call["function"] = {**_without_nulls(function), "arguments": {} if arguments is None else arguments}
    return call


def _from_json(value: Any, where: str, name: str) -> Any:
    """The value of JSON text; other values as they are."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
    if parsed is not value:
        check_text({name: parsed}, where)
    return parsed


def _text_of(part: Any, image: str | None) -> str | None:
    """The text of a part of a message, or `image` where an image of another column is to stand; None: it is neither."""
    if not isinstance(part, Mapping):
        return None
    if part.get("type") == "image" and all(part[key] is None for key in part.keys() - {"type", "text"}):
        return image
    return part["text"] if part.get("type") == "text" and isinstance(part.get("text"), str) else None


def _has_half(value: Any) -> bool:
    if isinstance(value, str):
        return _HALF.search(value) is not None
    parts = [*value, *value.values()] if isinstance(value, Mapping) else value
    return isinstance(parts, list) and any(map(_has_half, parts))


def _without_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value is not None}


def _deep_without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _deep_without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_deep_without_nulls(entry) for entry in value] if isinstance(value, list) else value
