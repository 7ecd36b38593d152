"""Fields and values in words: `integer > 0`, `one of a, b or null`, `= other.key`."""

import json
import types
from os.path import expanduser
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator

from valor.config.base import BARE_ITEM
from valor.config.tree import Key

_WORDS = {int: "integer", float: "number", bool: "true/false", str: "text", dict: "dict", type(None): "null"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def type_text(key: Key) -> str:
    """What `key` takes."""
    return _text(key.info.annotation, key.info.metadata)


def _text(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _text(inner, [*metadata, *more])
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(str(option) for option in arguments)
    if origin in (Union, types.UnionType):
        parts = [_text(part, () if part is type(None) else metadata) for part in arguments]
        return " or ".join(parts)
    if origin is list:
        if any(item is BARE_ITEM for item in metadata):
            return f"{_text(arguments[0])} or a list of them"
        return f"list of {_plural(_text(arguments[0]))}"
    if origin is tuple:
        return f"list of {len(arguments)} {_plural(_text(arguments[0]))}"
    if origin is dict:
        return "dict"
    if any(isinstance(item, AfterValidator) and item.func is expanduser for item in metadata):
        return "path"
    return _WORDS.get(annotation, "value") + _bounds(metadata)


def _bounds(metadata: list[Any] | tuple[Any, ...]) -> str:
    flat: list[Any] = []
    for item in metadata:
        flat += getattr(item, "metadata", [item])
    limits = {kind: getattr(item, kind) for item in flat for kind in _SIGNS if hasattr(item, kind)}
    if limits == {"ge": 0, "le": 1}:
        return " from 0 to 1"
    return " and".join(f" {sign} {limits[kind]}" for kind, sign in _SIGNS.items() if kind in limits)


def _plural(text: str) -> str:
    plurals = {"integer": "integers", "number": "numbers", "text": "texts", "path": "paths"}
    return plurals.get(text, text.replace("one of", "any of"))


def default_text(key: Key) -> str:
    """The default of `key`; `= other.key` where it is inherited."""
    source = key.inherits
    if source is not None:
        return source if "${" in source else f"= {source}"
    return key.declared("derived") or show(key.info.get_default(call_default_factory=True)).strip("'")


def show(value: Any) -> str:
    """A value as one would type it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return f"'{value}'"
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
