"""What is wrong in a configuration, one line each: the key, what it takes, what it got, which one was meant."""

import difflib
from collections.abc import Collection
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from valor.config.describe import show, type_text
from valor.config.tree import is_section, schema


def nearest(root: type[BaseModel], key: str, limit: int = 3) -> list[str]:
    """Existing keys that `key` may have meant, best first.

    In this order: keys that end with what was typed; keys of the same section with a similar or abbreviated last
    name; keys elsewhere with the same or an abbreviated last name; keys that look alike as a whole.
    """
    keys = list(schema(root))
    parent, _, last = key.rpartition(".")
    suffix = [k for k in keys if k.endswith(f".{key}")]
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == parent}
    similar = [siblings[name] for name in difflib.get_close_matches(last, siblings, n=limit, cutoff=0.6)]
    initials = "".join(word[0] for word in last.split("_") if word)
    abbreviated = [siblings[initials]] if initials in siblings and len(initials) > 1 else []
    elsewhere = [k for k in keys if len(initials) > 1 and k.rpartition(".")[2] == initials]
    same_last = difflib.get_close_matches(key, [k for k in keys if k.rpartition(".")[2] == last], n=limit, cutoff=0.0)
    alike = difflib.get_close_matches(key, keys, n=limit, cutoff=0.75)
    found = suffix or (abbreviated + similar) or same_last or elsewhere or alike
    return list(dict.fromkeys(found))[:limit]


def unknown_key(root: type[BaseModel], key: str) -> str:
    """One line about a key that does not exist."""
    near = nearest(root, key)
    if not near:
        return f"unknown key '{key}': see `valor config keys`"
    quoted = [f"'{name}'" for name in near]
    choice = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
    return f"unknown key '{key}': did you mean {choice}?"


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
    """The longest leading part of a pydantic location that is a key (the rest are union branches and indices), and
    of an unknown key the part after that."""
    names = [str(part) for part in location]
    known = [length for length in range(1, len(names) + 1) if ".".join(names[:length]) in schema(root)]
    end = max(known, default=0)
    return ".".join(names[:end] if end and not is_section(root, ".".join(names[:end])) else names[: end + 1])


def _inherits_mistake(root: type[BaseModel], name: str, wrong: Collection[str]) -> bool:
    return name in schema(root) and schema(root)[name].inherits in wrong


def _line(root: type[BaseModel], key: str, details: list[ErrorDetails]) -> str:
    detail = details[0]
    found = schema(root).get(key)
    if detail["type"] == "extra_forbidden" or found is None:
        return unknown_key(root, key)
    if detail["type"] in ("model_type", "dict_type") and is_section(root, key):
        return not_a_section(key, detail["input"])
    if detail["type"] == "value_error":
        return f"{key}: {detail['ctx']['error']}"  # type: ignore[typeddict-item]
    value, location = detail["input"], ".".join(map(str, detail["loc"]))
    if get_origin(found.info.annotation) is dict and location != key:  # entries of a user's own naming
        message = detail["msg"]
        return f"{location}: {message[0].lower()}{message[1:]}, got {show(value)}"
    text = f"{key}: expected {type_text(found)}, got {show(value)}"
    allowed = detail.get("ctx", {}).get("expected", "")
    options = [option.strip("' ") for option in str(allowed).replace(" or ", ",").split(",")]
    near = difflib.get_close_matches(str(value), options, n=1, cutoff=0.7) if detail["type"] == "literal_error" else []
    return f"{text} (did you mean {near[0]}?)" if near else text


def not_a_section(key: str, value: Any) -> str:
    """One line about a section that was given a single value."""
    return f"{key}: is a section, got {show(value)}: set its keys (see `valor config keys {key}`)"
