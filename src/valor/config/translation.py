"""Put a composed tree into the terms of the schema: move aliases, drop what has no effect, name what is unknown."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from valor.config.aliases import Alias, find_alias
from valor.config.mistakes import show
from valor.config.names import unknown_key
from valor.config.tree import exists, flatten, get_at, is_section


@dataclass
class Translated:
    """The tree with real keys alone, the real keys that were set, notes to print once, and mistakes."""

    tree: dict[str, Any]
    set_keys: set[str]
    notes: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)


def translate(root: type[BaseModel], tree: dict[str, Any], set_keys: Collection[str]) -> Translated:
    """Split `tree` into real keys and the rest, and put the rest through the table of aliases."""
    rest: dict[str, Any] = {}
    result = Translated(_known(root, tree, "", rest), {key for key in set_keys if exists(root, key)})
    for key, value in rest.items():
        _translate_key(root, key, value, result)
    result.notes = list(dict.fromkeys(result.notes))
    result.mistakes = list(dict.fromkeys(result.mistakes))
    return result


def _known(root: type[BaseModel], tree: dict[str, Any], prefix: str, rest: dict[str, Any]) -> dict[str, Any]:
    """The part of `tree` that the schema has; the other plain keys go into `rest`."""
    known: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if is_section(root, key) and isinstance(value, dict):
            known[name] = _known(root, value, f"{key}.", rest)
        elif exists(root, key) and not (is_section(root, key) and find_alias(root, key, value)):
            known[name] = value
        else:
            rest |= flatten(value, f"{key}.")
    return known


def _translate_key(root: type[BaseModel], key: str, value: Any, result: Translated) -> None:
    rule = find_alias(root, key, value)
    if rule is None:
        result.mistakes.append(unknown_key(root, key))
        return
    alias, target = rule
    if alias.refused:
        if value not in (None, False, {}):
            result.mistakes.append(f"{key} is a verl key that Valor does not have: {alias.reason}")
    elif target is None:
        if value is not None:
            result.notes.append(f"{key} has no effect: {alias.reason}")
    elif value is not None:
        _move(root, key, target, value, alias, result)


def _move(root: type[BaseModel], key: str, target: str, value: Any, alias: Alias, result: Translated) -> None:
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
    why = f" ({alias.reason})" if alias.reason else ""
    result.notes.append(f"{key} is read as {target}{why}")
