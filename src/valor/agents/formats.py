"""How models write tool calls, by name: the text of a turn, read as calls and what is said beside them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from valor.algorithms.registry import Named

Schema = Mapping[str, Any]
"""OpenAI's description of a function: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_MARK = re.compile(f"{_CALL}|{_THINK}")
_NAMED = re.compile(r'\{\s*"name"\s*:')
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that can be read. Whether there is such a tool, and whether it takes the arguments, is seen later."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """The text of a call that cannot be read, and a reason that the model can act on."""

    text: str
    reason: str


Call = ToolCall | BadCall


class Parsed(NamedTuple):
    """The calls in order; the text that is neither a call nor thinking."""

    calls: list[Call]
    content: str


Format = Callable[[str, Sequence[Schema]], Parsed]
"""Reads the text of a turn (without its end-of-turn token), given the schemas of the tools. Never raises."""

FORMATS = Named[Format]("rollout.multi_turn.format")
register_format = FORMATS.register


@register_format("hermes")
def parse_hermes(text: str, schemas: Sequence[Schema] = ()) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""
    return _parse_tagged(text, _json_call, _json_end)


@register_format("qwen3_coder")
def parse_qwen3_coder(text: str, schemas: Sequence[Schema] = ()) -> Parsed:
    """`<tool_call><function=NAME><parameter=P>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.

    A value is converted to the type that the tool's schema has for it.
    """
    functions = [schema["function"] for schema in schemas]
    types = {f["name"]: (f.get("parameters") or {}).get("properties") or {} for f in functions}
    return _parse_tagged(text, lambda body: _xml_call(body, types))


def _parse_tagged(
    text: str, read: Callable[[str], Call], skip: Callable[[str, int], int | None] = lambda text, at: None
) -> Parsed:
    """Split at the tags of calls and of thinking. `skip` may find the end of what a call's closing tag comes after."""
    text = _without_leading_thinking(text)
    content, calls, at = [], [], 0
    while (mark := _MARK.search(text, at)) is not None:
        is_call = mark[0] == _CALL
        closing = _END_CALL if is_call else _END_THINK
        end = text.find(closing, (is_call and skip(text, mark.end())) or mark.end())
        if is_call:
            body = text[mark.end() : end if end >= 0 else None]
            calls.append(read(body) if end >= 0 else BadCall(body, f"{_CALL} has no {_END_CALL}"))
        content.append(text[at : mark.start()])
        at = end + len(closing) if end >= 0 else len(text)
    content.append(text[at:])
    return Parsed(calls, "".join(content).strip())


def _without_leading_thinking(text: str) -> str:
    """The text behind thinking; this may have begun in the prompt (an end without a beginning), as some chat templates
    have it."""
    before, end, rest = text.partition(_END_THINK)
    starts = [name.start() for name in _NAMED.finditer(before)]
    in_call = any((_json_end(text, start) or 0) > len(before) for start in starts)  # a text among its arguments
    if end and _THINK not in before and not in_call:
        return rest
    stripped = text.lstrip()
    return stripped.partition(_END_THINK)[2] if stripped.startswith(_THINK) else text


def _json_end(text: str, at: int) -> int | None:
    """Where the JSON that begins at `at`, or after white space, ends. A closing tag inside its texts is text."""
    start = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # matches everywhere
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _json_call(body: str) -> Call:
    call = _decoded(body)
    if isinstance(call, BadCall):
        return call
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return BadCall(body, 'the call has no "name"')
    if not isinstance(call.get("arguments"), dict):
        return BadCall(body, '"arguments" must be a JSON object')
    return ToolCall(call["name"], call["arguments"])


def _decoded(body: str) -> Any:
    try:
        return json.loads(body, parse_constant=_refuse)
    except RecursionError:
        return BadCall(body, "it is nested too deeply")
    except json.JSONDecodeError as error:
        return BadCall(body, f"it is not valid JSON: {error.msg} at character {error.pos + 1}")
    except ValueError:
        return BadCall(body, "it is not valid JSON: a number is too long or not finite")


def _xml_call(body: str, types: Mapping[str, Mapping[str, Schema]]) -> Call:
    function = _FUNCTION.fullmatch(body)
    if function is None:
        return BadCall(body, "it must be <function=NAME> ... </function>")
    name, text = function[1].strip(), function[2]
    arguments, at = {}, 0
    while at < len(text) and (argument := _PARAMETER.match(text, at)):
        key = argument[1].strip()
        arguments[key] = _converted(argument[2], types.get(name, {}).get(key, {}))
        at = argument.end()
    if text[at:].strip():
        return BadCall(text, "between <function> and </function> there must be only <parameter=NAME> ... </parameter>")
    return ToolCall(name, arguments)


def _converted(text: str, schema: Schema) -> Any:
    """A value written without quotes, as the type that the schema has for it.

    What is not of that type stays text, and the check of the arguments says so.
    """
    given = schema.get("type", "any" if "anyOf" in schema else "string")
    kinds = {given} if isinstance(given, str) else set(given)
    if schema.get("nullable"):
        kinds.add("null")
    if kinds == {"string"}:
        return text
    value = _decoded({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    fits = "any" in kinds or kinds & _KINDS.get(type(value), set())
    return value if fits and not isinstance(value, BadCall) else text


_KINDS: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    list: {"array"},
    dict: {"object"},
}
