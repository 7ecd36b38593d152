"""Calls of models that write nearly JSON, as JSON: Python's calls (LFM2), and those of Gemma."""

import ast
import json
import re
from collections.abc import Callable
from typing import NamedTuple

_NAME = r"[^\s{}[\](),:=<>'\"]+"
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = "\\'\"abfnrtvxuU01234567"  # others stand for themselves, backslash included, as in Python
_PYTHON_TEXT = r"'(?:[^'\\]|\\.)*+(?:'|\Z)|\"(?:[^\"\\]|\\.)*+(?:\"|\Z)"


class NearlyJSON(NamedTuple):
    """`text` is the pattern of a text in quotes, `shape` says how calls are written, and `as_json` makes JSON of them;
    ValueError: they are not written so."""

    text: str
    shape: str
    as_json: Callable[[str], str]


def _rewriter(text: str, unquoted: Callable[[str], str], equals: str, call: str) -> Callable[[str], str]:
    parts = re.compile(rf"(?P<text>{text})|{call}|(?P<name>{_NAME})\s*{equals}|(?P<word>\w+)", re.DOTALL)

    def part(found: re.Match[str]) -> str:
        if found["text"] is not None:
            return json.dumps(unquoted(found["text"]))
        if found["call"]:
            return f'{{"name": {json.dumps(found["call"])}, "arguments": {{{parts.sub(part, found["arguments"])}}}}}'
        return f"{json.dumps(found['name'])}:" if found["name"] else _CONSTANTS.get(found["word"], found["word"])

    def as_json(calls: str) -> str:
        try:
            written = parts.sub(part, calls)
            json.loads(written)
        except (SyntaxError, RecursionError) as error:
            raise ValueError(str(error)) from None
        return written

    return as_json


def _python_text(quoted: str) -> str:
    def escape(pair: re.Match[str]) -> str:
        return pair[0] if pair[1] in _ESCAPES else "\\" + pair[0]

    literal = re.sub(r"\\(.)", escape, quoted, flags=re.DOTALL)
    return ast.literal_eval(literal.replace("\n", "\\n").replace("\r", "\\r"))


def _python() -> NearlyJSON:
    call = rf"(?P<call>{_NAME})\((?P<arguments>(?:{_PYTHON_TEXT}|[^()'\"])*+)\)"
    return NearlyJSON(
        _PYTHON_TEXT, "[NAME(NAME=VALUE, ...)], as in Python", _rewriter(_PYTHON_TEXT, _python_text, "=", call)
    )


def gemma(quote: str) -> NearlyJSON:
    """Gemma's calls, with texts between `quote` and `quote`."""
    text, ends = rf"{re.escape(quote)}.*?(?:{re.escape(quote)}|\Z)", len(quote)
    call = rf"call:\s*(?P<call>{_NAME})\s*\{{(?P<arguments>.*)\}}\s*\Z"
    shape = f"call:NAME{{NAME:VALUE,...}}, with texts between {quote} and {quote}"
    closed = text.replace(r"|\Z", "")
    return NearlyJSON(text, shape, _rewriter(closed, lambda quoted: quoted[ends:-ends], ":", call))


PYTHON = _python()
