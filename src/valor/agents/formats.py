"""How models write tool calls, by name: the text of a turn, read as calls, thinking and what is said beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from valor.errors import UserError, did_you_mean

Schema = Mapping[str, Any]
"""OpenAI's description of a function: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_MARK = re.compile(f"{_CALL}|{_THINK}")
_PYTHON_TAG = "<|python_tag|>"
_NAMED = re.compile(r'\{\s*"name"\s*:')
_HARMONY = re.compile(
    r"(?:<\|start\|>assistant(?P<role>[^<]*))?<\|channel\|>(?P<header>(?:(?!<\|message\|>).)*)<\|message\|>"
    r"(?P<body>(?:(?!<\|(?:start|end|call|return)\|>).)*)(?:<\|(?:end|call|return)\|>)?",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


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
    """The calls in order; the text that is neither a call nor thinking; the text of the thinking."""

    calls: list[Call]
    content: str
    thinking: str


Format = Callable[[str, Sequence[Schema]], Parsed]
"""Reads the text of a turn (without its end-of-turn token), given the schemas of the tools. Never raises."""

FORMATS: dict[str, Format] = {}


def register_format(name: str) -> Callable[[Format], Format]:
    """Make a function the reader of `rollout.multi_turn.format=name`."""

    def register(function: Format) -> Format:
        FORMATS[name] = function
        return function

    return register


def find_format(name: str) -> Format:
    """The reader of a format. Raises UserError for a name that is not registered."""
    if name not in FORMATS:
        known = f"the formats are {', '.join(sorted(FORMATS))}, and yours by valor.agents.register_format"
        raise UserError(f"rollout.multi_turn.format: there is no '{name}'{did_you_mean(name, FORMATS)} ({known})")
    return FORMATS[name]


@register_format("hermes")
def parse_hermes(text: str, schemas: Sequence[Schema] = ()) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""
    return _parse_tagged(text, _json_call, _json_end)


@register_format("qwen3_coder")
def parse_qwen3_coder(text: str, schemas: Sequence[Schema] = ()) -> Parsed:
    """`<tool_call><function=NAME><parameter=P>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.

    A value is converted to the type that the tool's schema has for it.
    """
    types = _types(schemas)
    return _parse_tagged(text, lambda body: _xml_call(body, types))


@register_format("glm")
def parse_glm(text: str, schemas: Sequence[Schema] = ()) -> Parsed:
    """`<tool_call>NAME<arg_key>P</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5 and later."""
    types = _types(schemas)
    return _parse_tagged(text, lambda body: _glm_call(body, types))


@register_format("llama3_json")
def parse_llama3_json(text: str, schemas: Sequence[Schema] = ()) -> Parsed:
    """`{"name": ..., "parameters": {...}}` as the whole text, several of them with `;` between: Llama 3.

    Other text, and JSON that does not begin with a name, is an answer, unless `<|python_tag|>` stands before it.
    """
    thinking, text = _leading_thinking(text)
    rest = text.strip()
    tagged = rest.startswith(_PYTHON_TAG)
    rest = rest.removeprefix(_PYTHON_TAG).strip()
    if not tagged and not _NAMED.match(rest):
        return Parsed([], text.strip(), thinking)
    calls: list[Call] = []
    while rest:
        end = _json_end(rest, 0) or len(rest)
        calls.append(_json_call(rest[:end], ("parameters", "arguments")))
        rest = rest[end:].lstrip("; \n")
    return Parsed(calls, "", thinking)


@register_format("gpt-oss")
def parse_gpt_oss(text: str, schemas: Sequence[Schema] = ()) -> Parsed:
    """Harmony: messages to `functions.NAME`, whose text is the arguments as JSON. The analysis channel is thinking.

    The last message may lack its end token, since that is what ends the turn.
    """
    parsed, at = Parsed([], "", ""), 0
    content, thinking = [], []
    for message in _HARMONY.finditer(text):
        content.append(text[at : message.start()])
        at = message.end()
        header, body = f"{message['role'] or ''} {message['header']}", message["body"]
        recipient = _RECIPIENT.search(header)
        if recipient:
            parsed.calls.append(_named_call(recipient[1], body))
        elif message["header"].lstrip().startswith("analysis"):
            thinking.append(body)
        else:
            content.append(body)
    return parsed._replace(content="".join([*content, text[at:]]).strip(), thinking="\n".join(thinking).strip())


def _parse_tagged(
    text: str, read: Callable[[str], Call], skip: Callable[[str, int], int | None] = lambda text, at: None
) -> Parsed:
    """Split at the tags of calls and of thinking. `skip` may find the end of what a call's closing tag comes after."""
    thought, text = _leading_thinking(text)
    thoughts, content, calls, at = [thought], [], [], 0
    while (mark := _MARK.search(text, at)) is not None:
        is_call = mark[0] == _CALL
        closing = _END_CALL if is_call else _END_THINK
        end = text.find(closing, (is_call and skip(text, mark.end())) or mark.end())
        body = text[mark.end() : end if end >= 0 else None]
        if not is_call:
            thoughts.append(body)
        else:
            calls.append(read(body) if end >= 0 else BadCall(body, f"{_CALL} has no {_END_CALL}"))
        content.append(text[at : mark.start()])
        at = end + len(closing) if end >= 0 else len(text)
    content.append(text[at:])
    return Parsed(calls, "".join(content).strip(), "\n".join(filter(None, map(str.strip, thoughts))))


def _leading_thinking(text: str) -> tuple[str, str]:
    """Thinking that began in the prompt (an end without a beginning, as some chat templates have it), and the rest."""
    before, end, rest = text.partition(_END_THINK)
    starts = [name.start() for name in _NAMED.finditer(before)]
    in_call = any((_json_end(text, start) or 0) > len(before) for start in starts)  # a text among its arguments
    if end and _THINK not in before and not in_call:
        return before.strip(), rest
    stripped = text.lstrip()
    if stripped.startswith(_THINK):
        before, _, rest = stripped.removeprefix(_THINK).partition(_END_THINK)
        return before.strip(), rest
    return "", text


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


def _json_call(body: str, names_of_arguments: Sequence[str] = ("arguments",)) -> Call:
    call = _decoded(body)
    if isinstance(call, BadCall):
        return call
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return BadCall(body, 'the call has no "name"')
    key = next((key for key in names_of_arguments if key in call), names_of_arguments[0])
    if not isinstance(call.get(key), dict):
        return BadCall(body, f'"{key}" must be a JSON object')
    return ToolCall(call["name"], call[key])


def _named_call(name: str, body: str) -> Call:
    arguments = _decoded(body)
    if isinstance(arguments, dict | BadCall):
        return arguments if isinstance(arguments, BadCall) else ToolCall(name, arguments)
    return BadCall(body, "the arguments must be a JSON object")


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
    reason = "between <function> and </function> there must be only <parameter=NAME> ... </parameter>"
    return _with_arguments(function[1].strip(), function[2], _PARAMETER, types, reason)


def _glm_call(body: str, types: Mapping[str, Mapping[str, Schema]]) -> Call:
    name = _GLM_NAME.match(body)
    if name is None:
        return BadCall(body, "the call has no name")
    reason = "after the name there must be only <arg_key>NAME</arg_key> <arg_value>...</arg_value>"
    return _with_arguments(name[1], body[name.end() :], _GLM_ARGUMENT, types, reason)


def _with_arguments(
    name: str, text: str, pattern: re.Pattern[str], types: Mapping[str, Mapping[str, Schema]], reason: str
) -> Call:
    arguments, at = {}, 0
    while at < len(text) and (argument := pattern.match(text, at)):
        key = argument[1].strip()
        arguments[key] = _converted(argument[2], types.get(name, {}).get(key, {}))
        at = argument.end()
    return BadCall(text, reason) if text[at:].strip() else ToolCall(name, arguments)


def _types(schemas: Sequence[Schema]) -> dict[str, Mapping[str, Schema]]:
    """The schemas of the parameters of each tool, by their names."""
    functions = [schema["function"] for schema in schemas]
    return {f["name"]: (f.get("parameters") or {}).get("properties") or {} for f in functions}


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
