"""How models write tool calls, by name: parsers of the text of a turn."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from valor.algorithms.registry import Named

Schema = Mapping[str, Any]
"""OpenAI's description of a function: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_MARK = re.compile("|".join((_CALL, _END_CALL, _THINK, _END_THINK)))
_END_PARAMETER = rf"\n?</parameter>(?=\s*(?:<parameter=[^>\n]+>|</function>\s*(?:{_END_CALL}|\Z)))"
_PARAMETER = re.compile(rf"\s*<parameter=([^>\n]+)>\n?(.*?){_END_PARAMETER}", re.DOTALL)
_FUNCTION = re.compile(rf"\s*<function=([^>\n]+)>((?>{_PARAMETER.pattern})*+)\s*</function>\s*", re.DOTALL)
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
    """A call that can be read; the toolbox checks its name and arguments."""

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
    """The JSON schema of a tool's arguments, with `"nullable": true` (transformers' Optional) as an alternative."""
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
                bad = BadCall(
                    text[called_at : mark.start()],
                    f"there is a {_END_CALL} without a {_CALL}: is one of the tags of a call in an argument?",
                )
                calls[-1:] = [bad]
        else:
            body_ends = body_end(text, at)
            end = text.find(_END_CALL, body_ends or at)
            call = text[at : end if end >= 0 else None]
            _, thinking_ends, rest = call.partition(_END_THINK)
            begins = end >= 0 or _BEGINNING.match(call)
            if not thought and body_ends is None and thinking_ends and (_CALL in rest or not begins):
                continue  # thinking, which the prompt has opened, names the tag
            calls.append(read(call) if end >= 0 else BadCall(call, f"{_CALL} has no {_END_CALL}"))
            called_at = at
            at = end + len(_END_CALL) if end >= 0 else len(text)
    return Parsed(calls, "".join([*content, text[at:]]).strip())


def _json_end(text: str, at: int) -> int | None:
    start = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # matches everywhere
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _xml_end(text: str, at: int) -> int | None:
    end = function.end() if (function := _FUNCTION.match(text, at)) else -1
    return end if text.startswith(_END_CALL, end) or end == len(text) else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


def _finite(number: str) -> float:
    return float(number) if math.isfinite(float(number)) else _refuse(number)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > len(dict(pairs)):
        raise LookupError(f'"{Counter(name for name, _ in pairs).most_common(1)[0][0][:60]}" is there twice')
    return dict(pairs)


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
        return valid_text(json.loads(body, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_once))
    except RecursionError:
        return BadCall(body, "it is nested too deeply")
    except json.JSONDecodeError as error:
        return BadCall(body, f"it is not valid JSON: {error.msg} at character {error.pos + 1}")
    except LookupError as error:
        return BadCall(body, str(error))
    except ValueError:
        return BadCall(body, "it is not valid JSON: a number is too long or not finite")


def _xml_call(body: str, schemas: Mapping[str, Schema]) -> Call:
    function = _FUNCTION.fullmatch(body)
    if function is None:
        return BadCall(
            body, "it must be <function=NAME>, then only <parameter=NAME> ... </parameter>, then </function>"
        )
    name, arguments = function[1].strip(), dict[str, Any]()
    check = Draft202012Validator(parameters_of(schemas[name]) if name in schemas else {})
    for parameter in _PARAMETER.finditer(body, function.start(2)):
        key = parameter[1].strip()
        if key in arguments:
            return BadCall(body, f"<parameter={key[:60]}> is there twice")
        arguments[key] = _typed(key, parameter[2], check)
    return ToolCall(name, arguments)


def _typed(key: str, text: str, check: Draft202012Validator) -> Any:
    """A value written without quotes: what JSON makes of it, or the text; the first that the schema takes, else the one
    with fewer errors, so that the check of the arguments says which."""
    value = _decoded({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))

    def errors(candidate: Any) -> int:
        return sum([*error.absolute_path][:1] == [key] for error in _all(check.iter_errors({key: candidate})))

    try:
        if isinstance(value, BadCall) or not any(map(errors, (None, True, 1, "", [], {}))):
            return text
        takes_texts = not errors("")
        candidates = [text, value] if isinstance(value, str) else [value, text]
        return min(candidates, key=lambda one: (errors(one), takes_texts and one is not text and errors(one) > 0))
    except Exception:  # too deeply nested, or a reference in the schema that leads nowhere
        return text


def _all(errors: Iterable[ValidationError]) -> Iterator[ValidationError]:
    """Errors, and those of the alternatives of each."""
    for error in errors:
        yield error
        yield from _all(error.context or ())
