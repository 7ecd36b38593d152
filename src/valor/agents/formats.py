"""How models write tool calls, by name: the text of a turn, read as calls and what is said beside them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match

from valor.algorithms.registry import Named

Schema = Mapping[str, Any]
"""OpenAI's description of a function: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_MARK = re.compile("|".join((_CALL, _END_CALL, _THINK, _END_THINK)))
_END_PARAMETER = rf"\n?</parameter>(?=\s*(?:<parameter=[^>\n]+>|</function>\s*(?:{_END_CALL}|\Z)))"
_PARAMETER = re.compile(rf"\s*<parameter=([^>\n]+)>\n?(.*?){_END_PARAMETER}", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_END_FUNCTION = re.compile(r"\s*</function>\s*")
_BEGINNING = re.compile(r'\s*(?:\{\s*"|<function=)')


def valid_text(value: Any) -> Any:
    """A value of JSON with U+FFFD for every half of a surrogate pair: no file, tokenizer or request takes those."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {valid_text(key): valid_text(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(valid_text, value))
    return value


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that can be read. Whether there is such a tool, and whether it takes the arguments, is seen later."""

    name: str
    arguments: dict[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", valid_text(self.name))
        object.__setattr__(self, "arguments", valid_text(self.arguments))


@dataclass(frozen=True, slots=True)
class BadCall:
    """The text of a call that cannot be read, and a reason that the model can act on."""

    text: str
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", valid_text(self.text))


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

    A value becomes what the tool's schema takes: JSON, or the text as it is written.
    """
    by_name = {schema["function"]["name"]: schema for schema in schemas}
    return _parse_tagged(text, lambda body: _xml_call(body, by_name), _xml_end, exact=False)


def parameters_of(schema: Schema) -> Any:
    """The JSON schema of a tool's arguments, `"nullable": true` (transformers' Optional) in JSON Schema's own words."""
    return _with_nulls(schema["function"].get("parameters") or {"type": "object", "properties": {}})


def _with_nulls(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_nulls(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {key: _with_nulls(part) for key, part in schema.items() if key != "nullable" or part is not True}
    return {"anyOf": [plain, {"type": "null"}]} if len(plain) < len(schema) else plain


def _parse_tagged(
    text: str, read: Callable[[str], Call], body_end: Callable[[str, int], int | None], *, exact: bool = True
) -> Parsed:
    """Split at the tags of calls and of thinking.

    `body_end(text, start)` is where a well-formed call ends, whatever tags its arguments hold, else None. `exact`:
    arguments are quoted, so that this end is certain; else one more closing tag behind it makes the call a bad one. An
    end of thinking without a beginning (chat templates open it in the prompt): all before it was thinking.
    """
    content: list[str] = []
    calls: list[Call] = []
    at = called_at = 0
    thought = False
    while (mark := _MARK.search(text, at)) is not None:
        content.append(text[at : mark.start()])
        at = mark.end()
        if mark[0] == _THINK:
            end = text.find(_END_THINK, at)
            at, thought = end + len(_END_THINK) if end >= 0 else len(text), True
        elif mark[0] == _END_THINK:
            content = [*content, _END_THINK] if thought else []
            calls, thought = calls if thought else [], True
        elif mark[0] == _END_CALL:
            if not calls or (not exact and isinstance(calls[-1], ToolCall)):
                bad = BadCall(text[called_at : mark.start()], f"there is a {_END_CALL} without a {_CALL}: is one of the tags of a call in an argument?")
                calls[-1:] = [bad]
        else:
            body_ends = body_end(text, at)
            end = text.find(_END_CALL, body_ends or at)
            if not thought and body_ends is None and _in_thinking(text, at, end):
                continue
            called_at, body = at, text[at : end if end >= 0 else None]
            calls.append(read(body) if end >= 0 else BadCall(body, f"{_CALL} has no {_END_CALL}"))
            at = end + len(_END_CALL) if end >= 0 else len(text)
    return Parsed(calls, "".join([*content, text[at:]]).strip())


def _in_thinking(text: str, start: int, end: int) -> bool:
    """Whether the tag before `start` belongs to thinking that began in the prompt: this ends before the call does (at
    `end`; -1: nowhere), which has another beginning or does not even begin like one."""
    thinking_ends = text.find(_END_THINK, start, end if end >= 0 else None)
    if thinking_ends < 0:
        return False
    return _CALL in text[thinking_ends : end if end >= 0 else None] or (end < 0 and not _BEGINNING.match(text, start))


def _json_end(text: str, at: int) -> int | None:
    start = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # matches everywhere
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _xml_end(text: str, at: int) -> int | None:
    if (function := _FUNCTION.match(text, at)) is None:
        return None
    at = function.end()
    while (parameter := _PARAMETER.match(text, at)) is not None:
        at = parameter.end()
    end = _END_FUNCTION.match(text, at)
    return end.end() if end is not None and (text.startswith(_END_CALL, end.end()) or end.end() == len(text)) else None


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
        return valid_text(json.loads(body, parse_constant=_refuse))
    except RecursionError:
        return BadCall(body, "it is nested too deeply")
    except json.JSONDecodeError as error:
        return BadCall(body, f"it is not valid JSON: {error.msg} at character {error.pos + 1}")
    except ValueError:
        return BadCall(body, "it is not valid JSON: a number is too long or not finite")


def _xml_call(body: str, schemas: Mapping[str, Schema]) -> Call:
    function = _FUNCTION.match(body)
    if function is None:
        return BadCall(body, "it must be <function=NAME> ... </function>")
    name, at = function[1].strip(), function.end()
    arguments: dict[str, Any] = {}
    check = Draft202012Validator(parameters_of(schemas[name]) if name in schemas else {})
    while (argument := _PARAMETER.match(body, at)) is not None:
        key = argument[1].strip()
        if key in arguments:
            return BadCall(body, f"<parameter={key[:60]}> is there twice")
        arguments[key] = _typed(key, argument[2], check)
        at = argument.end()
    end = _END_FUNCTION.match(body, at)
    if end is None or end.end() < len(body):
        return BadCall(body, "between <function> and </function> there must be only <parameter=NAME> ... </parameter>")
    return ToolCall(name, arguments)


def _typed(key: str, text: str, check: Draft202012Validator) -> Any:
    """A value written without quotes: what JSON makes of it, or the text; the first that the schema takes, else the
    first of the right type, so that the check of the arguments says what else is wrong with it."""
    value = _decoded({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    if isinstance(value, BadCall):
        return text
    candidates = [text, value] if isinstance(value, str) else [value, text]
    try:
        ranks = [_rank(check, key, one) for one in candidates]
        if not any(ranks) and not any(_rank(check, key, one) for one in (None, True, 1, "", [], {})):
            return text  # the schema says nothing of it
    except Exception:  # too deeply nested, or a reference in the schema that leads nowhere
        return text
    return candidates[ranks.index(min(ranks))]


def _rank(check: Draft202012Validator, key: str, value: Any) -> int:
    """0: the schema takes the value for this argument; 1: it has the right type; 2: it has not."""
    errors = [own for error in check.iter_errors({key: value}) for own in _errors_of(key, error)]
    return 0 if not errors else 1 + all(e.validator == "type" and len(e.absolute_path) == 1 for e in errors)


def _errors_of(key: str, error: ValidationError) -> list[ValidationError]:
    """The errors of one argument in an error of all; of alternatives for all, where none takes it."""
    if error.absolute_path:
        return [best_match([error])] if error.absolute_path[0] == key else []
    alternatives: dict[Any, list[ValidationError]] = {}
    for one in error.context or ():
        alternatives.setdefault(one.schema_path[0], []).extend(_errors_of(key, one))
    return [*chain.from_iterable(alternatives.values())] if all(alternatives.values()) else []
