"""Put a composed tree into the terms of the schema: read verl's spellings, drop what has no effect, name the rest."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from valor.config.describe import show
from valor.config.mistakes import unknown_key
from valor.config.rules import Asked
from valor.config.tree import exists, flatten, get_at, is_section
from valor.config.verl import SPELLINGS, Spelling, find_spelling

_VALUES = [one for one in SPELLINGS if one.value is not None]


@dataclass
class Translated:
    """The tree with real keys alone, the real keys that were set, and what there is to tell about the others."""

    tree: dict[str, Any]
    set_keys: set[str]
    notes: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    unavailable: Asked = field(default_factory=dict)


def translate(root: type[BaseModel], tree: dict[str, Any], set_keys: Collection[str]) -> Translated:
    """Split `tree` into real keys and the rest, and put the rest through the table of spellings."""
    result = Translated({}, {key for key in set_keys if exists(root, key)})
    rest: dict[str, Any] = {}
    result.tree = _known(root, tree, "", rest, result)
    for key, value in rest.items():
        _translate_key(root, key, value, result)
    result.notes = list(dict.fromkeys(result.notes))
    result.mistakes = list(dict.fromkeys(result.mistakes))
    return result


def _known(
    root: type[BaseModel], tree: dict[str, Any], prefix: str, rest: dict[str, Any], result: Translated
) -> dict[str, Any]:
    """The part of `tree` that the schema has; the other plain keys go into `rest`."""
    known: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if is_section(root, key) and isinstance(value, dict):
            known[name] = _known(root, value, f"{key}.", rest, result)
        elif exists(root, key) and not (is_section(root, key) and find_spelling(root, key, value)):
            known[name] = _meant(key, value, result)
        else:
            rest |= flatten(value, f"{key}.")
    return known


def _meant(key: str, value: Any, result: Translated) -> Any:
    for one in _VALUES:
        if one.match(key, value) is not None:
            if key in result.set_keys:
                result.notes.append(f"{key}={value} is read as {one.value}")
            return one.value
    return value


def _translate_key(root: type[BaseModel], key: str, value: Any, result: Translated) -> None:
    rule = find_spelling(root, key, value)
    if rule is None:
        result.mistakes.append(unknown_key(root, key))
        return
    spelling, target = rule
    feature = spelling.unavailable
    if value is None:
        return
    if target is not None:
        _move(root, key, target, value, spelling, result)
    elif spelling.refused:
        if value not in (False, {}):
            result.mistakes.append(f"{key} is a verl key that Valor does not have: {spelling.reason}")
    elif feature is not None and feature.asks(value):
        result.unavailable.setdefault((feature.what, feature.instead), []).append(f"{key}={show(value)}")
    else:
        result.notes.append(f"{key} has no effect: {spelling.reason}")


def _move(root: type[BaseModel], key: str, target: str, value: Any, spelling: Spelling, result: Translated) -> None:
    value = _meant(target, value, result)
    if target in result.set_keys and get_at(result.tree, target) != value:
        there = get_at(result.tree, target)
        result.mistakes.append(f"{key}={show(value)} and {target}={show(there)} are the same setting: give one of them")
        return
    node = result.tree
    *parents, last = target.split(".")
    for name in parents:
        node = node.setdefault(name, {})
    node[last] = value
    result.set_keys.add(target)
    why = f" ({spelling.reason})" if spelling.reason else ""
    result.notes.append(f"{key} is read as {target}{why}")
