"""How models write tool calls, by name: parsers of the text of a turn."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from valor.agents.nearly_json import PYTHON, NearlyJSON, gemma
from valor.algorithms.registry import Named

Schema = Mapping[str, Any]
"""OpenAI's description of a function: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""

_THINK, _END_THINK = "<think>", "</think>"
_BEGINNING = re.compile(r'\s*(?:\{\s*"|<function=|[^\s<]+\s*<(?!/))')


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
    id: str = field(default="", compare=False)  # empty where the format writes none

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", valid_text(self.name))
        object.__setattr__(self, "arguments", valid_text(self.arguments))


@dataclass(frozen=True, slots=True)
class BadCall:
    """The text of a call that cannot be read, and a reason that the model can act on."""

    text: str
    reason: str


Call = ToolCall | BadCall


def call_id(call: Call, turn: int, number: int) -> str:
    """What a call is called; where its text does not say, by nine characters, as Mistral's templates want it."""
    return getattr(call, "id", "") or f"call{turn:03}{number:02}"


class Parsed(NamedTuple):
    """The calls in order; the text that is neither a call nor thinking."""

    calls: list[Call]
    content: str


Format = Callable[[str, Sequence[Schema]], Parsed]
"""Reads the text of a turn (without its end-of-turn token), given the schemas of the tools. Never raises."""

FORMATS = Named[Format]("rollout.multi_turn.format")
register_format = FORMATS.register


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


class _Syntax(NamedTuple):
    """How calls are written: `read` gives those of a text, and `end(text, start)` is where a well-formed one ends,
    whatever tags its arguments hold, else None. `exact`: arguments are quoted, so that this end is certain."""

    read: Callable[[str, Sequence[Schema]], list[Call]]
    end: Callable[[str, int], int | None]
    exact: bool = True


def _parse_tagged(
    begin: str, close: str, around: str, syntax: _Syntax, text: str, schemas: Sequence[Schema] = ()
) -> Parsed:
    """Split at the tags of calls and of thinking; those `around` all calls, a regular expression, say nothing.

    Where a syntax is not exact, one more closing tag behind a call makes it a bad one. An end of thinking without a
    beginning (chat templates open it in the prompt): all before it was thinking.
    """
    tags = re.compile("|".join(map(re.escape, (begin, close, _THINK, _END_THINK))))
    content: list[str] = []
    calls: list[Call] = []
    at = called_at = 0
    thought = False
    while (mark := tags.search(text, at)) is not None:
        content.append(text[at : mark.start()])
        at = mark.end()
        if mark[0] == _THINK:
            end = text.find(_END_THINK, at)
            at, thought = end + len(_END_THINK) if end >= 0 else len(text), True
        elif mark[0] == _END_THINK:
            if thought:
                content.append(_END_THINK)
            else:
                content, calls, thought = [], [], True
        elif mark[0] == close:
            if not calls or (not syntax.exact and isinstance(calls[-1], ToolCall)):
                why = f"there is a {close} without a {begin}: is one of the tags of a call in an argument?"
                calls[-1:] = [BadCall(text[called_at : mark.start()], why)]
        else:
            body_ends = syntax.end(text, at)
            end = text.find(close, body_ends or at)
            call = text[at : end if end >= 0 else None]
            _, thinking_ends, rest = call.partition(_END_THINK)
            begins = end >= 0 or _BEGINNING.match(call)
            if not thought and body_ends is None and thinking_ends and (begin in rest or not begins):
                continue  # thinking, which the prompt has opened, names the tag
            calls += syntax.read(call, schemas) if end >= 0 else [BadCall(call, f"{begin} has no {close}")]
            called_at = at
            at = end + len(close) if end >= 0 else len(text)
    return Parsed(calls, re.sub(around, "", "".join([*content, text[at:]])).strip())


def _parse_open(
    begin: re.Pattern[str], following: re.Pattern[str], syntax: _Syntax, text: str, schemas: Sequence[Schema] = ()
) -> Parsed:
    """Calls that nothing closes: from where the first begins, one follows the other."""
    mark = begin.search(text)
    if mark is None or _END_THINK not in text[mark.end() : syntax.end(text, mark.end())]:  # else it is in an argument
        text = text.rpartition(_END_THINK)[2].partition(_THINK)[0]
        mark = begin.search(text)
    calls, content, at = list[Call](), text[: mark.start() if mark else None], len(text)
    while mark is not None:
        at = syntax.end(text, mark.end()) or len(text)
        calls += syntax.read(text[mark.end() : at], schemas)
        mark = following.match(text, at)
    return Parsed(calls, (content + text[at:]).strip())


def _json_end(text: str, at: int) -> int | None:
    start = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # matches everywhere
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


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


def _json_calls(body: str, _: Sequence[Schema] = ()) -> list[Call]:
    calls = _decoded(body)
    return [_json_call(body, call) for call in (calls if calls and isinstance(calls, list) else [calls])]


def _json_call(body: str, call: Any) -> Call:
    """The call that is a value of JSON; `body` is its text, if it is a bad one."""
    if isinstance(call, BadCall):
        return call
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return BadCall(body, 'the call has no "name"')
    key = "parameters" if "parameters" in call and "arguments" not in call else "arguments"
    if not isinstance(call.get(key), dict):
        return BadCall(body, f'"{key}" must be a JSON object')
    return ToolCall(call["name"], call[key])


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


def _headed(head: str, shape: str) -> _Syntax:
    """A name, and perhaps an id, by a regular expression, then a JSON object of arguments."""
    pattern = re.compile(rf"\s*{head}\s*", re.DOTALL)

    def read(body: str, _: Sequence[Schema] = ()) -> list[Call]:
        if (header := pattern.match(body)) is None:
            return [BadCall(body, f"it must be {shape}, then a JSON object")]
        arguments = _decoded(body[header.end() :].strip().removesuffix("```") or "{}")
        if isinstance(arguments, BadCall):
            return [arguments]
        call = _json_call(body, {"name": header["name"], "arguments": arguments})
        return [replace(call, id=header["id"]) if isinstance(call, ToolCall) and "id" in pattern.groupindex else call]

    def end(text: str, at: int) -> int | None:
        return None if (header := pattern.match(text, at)) is None else _json_end(text, header.end())

    return _Syntax(read, end)


def _unquoted(head: str, key: tuple[str, str, str], after: str, close: str, shape: str) -> _Syntax:
    """Values without quotes, which become what the tool's schema takes: JSON, or the text as it is.

    `key`: what stands before an argument's name, between it and its value, and behind that. `after`: what follows the
    last one, before the closing tag.
    """
    before, between, behind = key
    ends = rf"{behind}(?=\s*(?:{before}{_KEY}{between}|{after}\s*(?:{close}|\Z)))"
    argument = re.compile(rf"\s*{before}({_KEY}){between}(.*?){ends}", re.DOTALL)
    call = re.compile(rf"\s*{head}((?>{argument.pattern})*+)\s*{after}\s*", re.DOTALL)

    def read(body: str, schemas: Sequence[Schema]) -> list[Call]:
        function = call.fullmatch(body)
        if function is None:
            return [BadCall(body, f"it must be {shape}")]
        name, arguments = function["name"].strip(), dict[str, Any]()
        by_name = {schema["function"]["name"]: schema for schema in schemas}
        check = Draft202012Validator(parameters_of(by_name[name]) if name in by_name else {})
        for parameter in argument.finditer(body, function.start(2)):
            key = parameter[1].strip()
            if key in arguments:
                return [BadCall(body, f"the argument {key[:60]} is there twice")]
            arguments[key] = _typed(key, parameter[2], check)
        return [ToolCall(name, arguments)]

    def end(text: str, at: int) -> int | None:
        end = function.end() if (function := call.match(text, at)) else -1
        return end if text.startswith(close, end) or end == len(text) else None

    return _Syntax(read, end, exact=False)


def _nearly_json(language: NearlyJSON, begin: str, close: str, around: str = "(?!)") -> Format:
    body = re.compile(rf"(?>{language.text}|(?!{re.escape(close)}).)*+(?={re.escape(close)})", re.DOTALL)

    def read(calls: str, _: Sequence[Schema] = ()) -> list[Call]:
        with suppress(SyntaxError, ValueError, RecursionError):
            json.loads(written := language.as_json(calls))
            return _json_calls(written)
        return [BadCall(calls, f"it must be {language.shape}")]

    syntax = _Syntax(read, lambda text, at: match.end() if (match := body.match(text, at)) else None)
    return partial(_parse_tagged, begin, close, around, syntax)


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


_NAME, _KEY = r'(?P<name>[^<>"\uff5c\s{}[\]]+)', r'[^<>"\n]+'
_TOOL = "<\uff5ctool▁{}\uff5c>".format
_JSON = _Syntax(_json_calls, _json_end)
_CODER = _unquoted(
    rf"<function={_NAME}>",
    ("<parameter=", r">\n?", r"\n?</parameter>"),
    "</function>",
    "</tool_call>",
    "<function=NAME>, then only <parameter=NAME> ... </parameter>, then </function>",
)
_GLM = _unquoted(
    _NAME,
    ("<arg_key>", r"</arg_key>\s*<arg_value>", "</arg_value>"),
    "",
    "</tool_call>",
    "NAME, then only <arg_key>NAME</arg_key><arg_value> ... </arg_value>",
)
_MINIMAX = _unquoted(
    rf'"?{_NAME}"?>',
    ('<parameter name="', '">', "</parameter>"),
    "",
    "</invoke>",
    '<invoke name="NAME">, then only <parameter name="NAME"> ... </parameter>, then </invoke>',
)
_KIMI = _headed(
    rf"(?P<id>(?:functions\.)?{_NAME}:\d+)\s*<\|tool_call_argument_begin\|>",
    "functions.NAME:NUMBER<|tool_call_argument_begin|>",
)
_DEEPSEEK = _headed(
    rf"(?:function{_TOOL('sep')})?{_NAME}\s*(?:```(?:json)?|{_TOOL('sep')})", f"function{_TOOL('sep')}NAME"
)
_HARMONY = _headed(rf".*?to=(?:functions\.)?{_NAME}.*?<\|message\|>", "to=functions.NAME<|message|>")
_ARGS = _headed(rf"{_NAME}(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?", "NAME[ARGS]")
_ARGUMENTS = "(?:parameters|arguments)"
_LLAMA = rf'<\|python_tag\|>|(?=\{{\s*"(?:(?:type|name)"\s*:.{{0,999}}"{_ARGUMENTS}|{_ARGUMENTS}"\s*:.*"name)"\s*:)'
_GEMMA4 = _nearly_json(gemma('<|"|>'), "<|tool_call>", "<tool_call|>", r"<\|tool_response>\Z")
_PHI = r"(?:<\|tool_call\|>|functools(?=\s*\[\s*\{))"

parse_hermes = partial(_parse_tagged, "<tool_call>", "</tool_call>", "(?!)", _JSON)
parse_qwen3_coder = partial(_parse_tagged, "<tool_call>", "</tool_call>", "(?!)", _CODER)


@register_format("gpt-oss")
def parse_harmony(text: str, schemas: Sequence[Schema] = ()) -> Parsed:
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}`."""
    calls, said = list[Call](), list[str]()
    for message in re.split(r"<\|(?:end|call|return)\|>", text):
        head, mark, body = message.partition("<|message|>")
        if "to=" in head and mark:
            calls += _HARMONY.read(message, ())
        elif "analysis" not in head:
            said.append(body if mark else head)
    return Parsed(calls, "\n".join(filter(None, said)).strip())


@register_format("mistral")
def parse_mistral(text: str, schemas: Sequence[Schema] = ()) -> Parsed:
    """`[TOOL_CALLS]` and a JSON list of calls, or `NAME[ARGS]{...}`."""
    syntax = _JSON if text.partition("[TOOL_CALLS]")[2].lstrip()[:1] in ("[", "{") else _ARGS
    text = text.replace("[THINK]", _THINK).replace("[/THINK]", _END_THINK)
    return _parse_open(re.compile(r"\[TOOL_CALLS\]"), re.compile(r"\s*\[TOOL_CALLS\]"), syntax, text, schemas)


@register_format("phi4_mini")
def parse_phi(text: str, schemas: Sequence[Schema] = ()) -> Parsed:
    """`<|tool_call|>[{...}]<|/tool_call|>`, or `functools[{...}]`, as vLLM's template asks for."""
    calls, content = _parse_open(re.compile(_PHI), re.compile(rf"\s*(?:<\|/tool_call\|>)?\s*{_PHI}"), _JSON, text)
    return Parsed(calls, content.replace("<|/tool_call|>", "").strip())


@register_format("gemma4")
def parse_gemma4(text: str, schemas: Sequence[Schema] = ()) -> Parsed:
    """`<|tool_call>call:NAME{NAME:VALUE}<tool_call|>`, behind a thought between `<|channel>` and `<channel|>`."""
    return _GEMMA4(text.replace("<|channel>", _THINK).replace("<channel|>", _END_THINK), schemas)


FORMATS |= {
    "hermes": parse_hermes,
    "qwen3_coder": parse_qwen3_coder,
    "llama3_json": partial(
        _parse_open, re.compile(_LLAMA, re.DOTALL), re.compile(r"[\s;]*(?:<\|python_tag\|>\s*)?(?=\{)"), _JSON
    ),
    "lfm2": _nearly_json(PYTHON, "<|tool_call_start|>", "<|tool_call_end|>"),
    "functiongemma": _nearly_json(
        gemma("<escape>"), "<start_function_call>", "<end_function_call>", "<start_function_response>"
    ),
    "glm": partial(_parse_tagged, "<tool_call>", "</tool_call>", r"<\|observation\|>\Z", _GLM),
    "minimax": partial(_parse_tagged, "<invoke name=", "</invoke>", "</?minimax:tool_call>", _MINIMAX),
    "kimi": partial(_parse_tagged, "<|tool_call_begin|>", "<|tool_call_end|>", r"<\|tool_calls_section_\w+\|>", _KIMI),
    "deepseek_v3": partial(_parse_tagged, _TOOL("call▁begin"), _TOOL("call▁end"), _TOOL(r"calls▁\w+"), _DEEPSEEK),
}
BUILT_IN = dict(FORMATS)
OF_TOKENS = {"<|tool_call_start|>": "lfm2", "<|tool_call|>": "phi4_mini"}  # whose templates leave calls out
FORMATS |= {"glm45": FORMATS["glm"], "kimi_k2": FORMATS["kimi"], "minimax_m2": FORMATS["minimax"]}  # as in vLLM
