"""Settings of a Python call as the overrides of a command line."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from valor.config.command_line import literal
from valor.config.tree import exists, is_section, schema
from valor.errors import UserError

_BARE = re.compile(r"(?!(?:null|true|false|inf|nan|none)$)/?[a-z][\w./-]*", re.IGNORECASE)  # a text needs no quotes


def overrides(root: type[BaseModel], settings: Mapping[str, Any]) -> list[str]:
    """`key=value` for each setting; what is wrong with a key or a value is for whoever loads them to say.

    A name is a key with `.` or `__` between its parts, or the end of one key alone: `train_batch_size`, `rollout.n`.
    A dict under the name of a section sets keys of it. UserError: a name that several keys end with.
    """
    return [f"{key}={_written(_plain(value, key))}" for key, value in _keys(root, settings)]


def _written(value: Any) -> str:
    return value if isinstance(value, str) and _BARE.fullmatch(value) else literal(value)


def _keys(root: type[BaseModel], settings: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        key = section + name if section else _whole(root, name.replace("__", "."))
        if is_section(root, key) and isinstance(value, Mapping):
            yield from _keys(root, value, f"{key}.")
        else:
            yield key, value


def _whole(root: type[BaseModel], name: str) -> str:
    ends = [key for key in schema(root) if key.endswith(f".{name}")]
    if exists(root, name) or not ends:
        return name
    if len(ends) > 1:
        raise UserError(f"{name}: which one is meant? {', '.join(ends)}: write more of it, with __ for the dots")
    return ends[0]


def _plain(value: Any, key: str) -> Any:
    """Numbers, texts, lists and dicts as a command line has them."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item, key) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, key) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(f"{key}: a setting is a number, a text, a list or a dict, got {type(value).__name__}")
