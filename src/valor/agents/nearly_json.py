"""Calls of models that write nearly JSON, as JSON: Python's calls (LFM2), and those of Gemma."""

import ast
import json
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

_NAME = r"[^\s{}[\](),:=<>'\"]++"
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = "\\'\"abfnrtvxuU01234567"  # others stand for themselves, backslash included, as in Python
_PYTHON_TEXT = r"'(?:[^'\\]|\\.)*+(?:'|\Z)|\"(?:[^\"\\]|\\.)*+(?:\"|\Z)"


class NearlyJSON(NamedTuple):
    """A function that makes JSON of calls, the pattern of their texts in quotes, and how they are written."""

    as_json: Callable[[str], str]
    text: str
    shape: str


def _as_json(parts: re.Pattern[str], unquoted: Callable[[str], str], calls: str) -> str:
    """SyntaxError: a text is none. What is written otherwise than `parts` expects becomes no JSON."""

    def part(found: re.Match[str]) -> str:
        if found["text"] is not None:
            return json.dumps(unquoted(found["text"]))
        if found["call"]:
            return f'{{"name": {json.dumps(found["call"])}, "arguments": {{{parts.sub(part, found["arguments"])}}}}}'
        return f"{json.dumps(found['name'])}:" if found["name"] else _CONSTANTS.get(found["word"], found["word"])

    return parts.sub(part, calls)


def _parts(text: str, call: str, equals: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<text>{text})|{call}|(?P<name>{_NAME})\s*{equals}|(?P<word>{_NAME})", re.DOTALL)


def _python_text(quoted: str) -> str:
    literal = re.sub(r"\\(.)", lambda pair: "\\" * (pair[1] not in _ESCAPES) + pair[0], quoted, flags=re.DOTALL)
    return ast.literal_eval(literal.replace("\n", "\\n").replace("\r", "\\r"))


_PYTHON_CALL = rf"(?P<call>{_NAME})\((?P<arguments>(?:{_PYTHON_TEXT}|[^()'\"])*+)\)"
PYTHON = NearlyJSON(
    partial(_as_json, _parts(_PYTHON_TEXT, _PYTHON_CALL, "="), _python_text),
    _PYTHON_TEXT,
    "[NAME(NAME=VALUE, ...)], as in Python",
)


def gemma(quote: str) -> NearlyJSON:
    text = f"{re.escape(quote)}.*?{re.escape(quote)}"
    call = rf"\A\s*call:\s*(?P<call>{_NAME})\s*\{{(?P<arguments>.*)\}}\s*\Z"
    as_json = partial(_as_json, _parts(text, call, ":"), lambda quoted: quoted[len(quote) : -len(quote)])
    return NearlyJSON(as_json, text, f"call:NAME{{NAME:VALUE,...}}, texts as {quote}text{quote}")
