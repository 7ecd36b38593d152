"""Put a composed tree into the terms of the schema: read verl's spellings, drop what has no effect, name the rest."""

from typing import Any

from pydantic import BaseModel

from valor.config.composition import Reading
from valor.config.describe import show
from valor.config.mistakes import unknown_key
from valor.config.tree import exists, flatten, get_at, is_section, set_at
from valor.config.verl import SPELLINGS, Spelling, find_spelling

_VALUES = [one for one in SPELLINGS if one.value is not None]


def translate(root: type[BaseModel], reading: Reading) -> None:
    """Leave real keys alone in the reading's tree, and put the rest through the table of spellings."""
    rest: dict[str, Any] = {}
    reading.set_keys = {key for key in reading.set_keys if exists(root, key)}
    reading.tree = _known(root, reading.tree, "", rest, reading)
    for key, value in rest.items():
        _translate_key(root, key, value, reading)


def _known(
    root: type[BaseModel], tree: dict[str, Any], prefix: str, rest: dict[str, Any], reading: Reading
) -> dict[str, Any]:
    """The part of `tree` that the schema has; the other plain keys go into `rest`."""
    known: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if is_section(root, key) and isinstance(value, dict):
            known[name] = _known(root, value, f"{key}.", rest, reading)
        elif exists(root, key) and not (is_section(root, key) and find_spelling(root, key, value)):
            known[name] = _meant(key, value, reading)
        else:
            rest |= flatten(value, f"{key}.")
    return known


def _meant(key: str, value: Any, reading: Reading) -> Any:
    for one in _VALUES:
        if one.match(key, value) is not None:
            if key in reading.set_keys:
                reading.notes.append(f"{key}={value} is read as {one.value}")
            return one.value
    return value


def _translate_key(root: type[BaseModel], key: str, value: Any, reading: Reading) -> None:
    rule = find_spelling(root, key, value)
    if rule is None:
        reading.mistakes.append(unknown_key(root, key))
        return
    spelling, target = rule
    feature = spelling.unavailable
    if value is None:
        return
    if target is not None:
        _move(root, key, target, value, spelling, reading)
    elif spelling.refused:
        if value not in (False, {}):
            reading.mistakes.append(f"{key} is a verl key that Valor does not have: {spelling.reason}")
    elif feature is not None and feature.asks(value):
        reading.unavailable.setdefault((feature.what, feature.instead), []).append(f"{key}={show(value)}")
    else:
        reading.notes.append(f"{key} has no effect: {spelling.reason}")


def _move(root: type[BaseModel], key: str, target: str, value: Any, spelling: Spelling, reading: Reading) -> None:
    value = _meant(target, value, reading)
    if target in reading.set_keys and get_at(reading.tree, target) != value:
        there = get_at(reading.tree, target)
        reading.mistakes.append(
            f"{key}={show(value)} and {target}={show(there)} are the same setting: give one of them"
        )
        return
    set_at(reading.tree, target, value)
    reading.set_keys.add(target)
    reading.notes.append(f"{key} is read as {target}" + (f" ({spelling.reason})" if spelling.reason else ""))
