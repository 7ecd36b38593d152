"""Pydantic's findings as one line each: the key, what it takes, what it got."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from valor.config.base import inherited_from
from valor.config.field_types import type_text
from valor.config.inheritance import absolute
from valor.config.names import unknown_key
from valor.config.tree import find_field, is_section

_SILENT = {"default_factory_not_called"}


def describe_errors(root: type[BaseModel], error: ValidationError, set_keys: Collection[str]) -> list[str]:
    """One line per wrong key; a key that only inherited a wrong value is left out."""
    wrong: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] not in _SILENT:
            wrong.setdefault(_key_of(root, detail["loc"]), []).append(detail)
    return [
        _line(root, key, details)
        for key, details in wrong.items()
        if key in set_keys or not _inherits_mistake(root, key, wrong)
    ]


def _key_of(root: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """The longest leading part of a pydantic location that is a key (the rest are union branches and indices)."""
    names: list[str] = []
    for part in location:
        candidate = ".".join([*names, str(part)])
        if names and find_field(root, ".".join(names)) and not find_field(root, candidate) and isinstance(part, int):
            break
        if not find_field(root, candidate) and names and not is_section(root, ".".join(names)):
            break
        names.append(str(part))
    return ".".join(names)


def _inherits_mistake(root: type[BaseModel], key: str, wrong: Collection[str]) -> bool:
    found = find_field(root, key)
    source = inherited_from(*found) if found else None
    return source is not None and absolute(source, key) in wrong


def _line(root: type[BaseModel], key: str, details: list[ErrorDetails]) -> str:
    detail = details[0]
    found = find_field(root, key)
    if detail["type"] == "extra_forbidden" or found is None:
        return unknown_key(root, key)
    if detail["type"] in ("model_type", "dict_type") and is_section(root, key):
        return not_a_section(key, detail["input"])
    if detail["type"] == "value_error":
        return f"{key}: {detail['ctx']['error']}"  # type: ignore[typeddict-item]
    section, name = found
    value, location = detail["input"], ".".join(map(str, detail["loc"]))
    if get_origin(section.model_fields[name].annotation) is dict and location != key:  # entries of a user's own naming
        message = detail["msg"]
        return f"{location}: {message[0].lower()}{message[1:]}, got {show(value)}"
    text = f"{key}: expected {type_text(section, name)}, got {show(value)}"
    allowed = detail.get("ctx", {}).get("expected", "")
    options = [option.strip("' ") for option in str(allowed).replace(" or ", ",").split(",")]
    near = difflib.get_close_matches(str(value), options, n=1, cutoff=0.7) if detail["type"] == "literal_error" else []
    return f"{text} (did you mean {near[0]}?)" if near else text


def not_a_section(key: str, value: Any) -> str:
    """One line about a section that was given a single value."""
    return f"{key}: is a section, got {show(value)}: set its keys (see `valor config keys {key}`)"


def show(value: Any) -> str:
    """A value as one would type it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return f"'{value}'"
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
