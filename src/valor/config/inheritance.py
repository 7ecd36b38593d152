"""The one resolver of `inherits`: a null key takes the value of the key that its field names."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from valor.config.base import REFERENCE, inherited_from
from valor.config.tree import find_field, get_at, walk_keys


def absolute(source: str, key: str) -> str:
    """`.name` written at `key` as a key from the root; other references are returned unchanged."""
    return f"{key.rpartition('.')[0]}{source}" if source.startswith(".") else source


def lookup(root: type[BaseModel], tree: dict[str, Any], key: str) -> Any:
    """The value of `key`: from `tree`, else inherited, else the field's default."""
    value = get_at(tree, key)
    found = find_field(root, key)
    if value is not None or found is None:
        return value
    section, name = found
    source = inherited_from(section, name)
    if source is None:
        return section.model_fields[name].get_default(call_default_factory=True)
    if "${" in source:
        return REFERENCE.sub(lambda match: str(lookup(root, tree, absolute(match[1], key))), source)
    return lookup(root, tree, absolute(source, key))


def fill_inherited(root: type[BaseModel], tree: dict[str, Any]) -> dict[str, Any]:
    """A copy of `tree` in which every inheriting key that is absent or null has its source's value.

    Sections given as model objects are copied as dicts of what was set on them.
    """
    filled = _as_dicts(tree)
    for key, section, name in walk_keys(root):
        if not inherited_from(section, name) or get_at(filled, key) is not None:
            continue
        node: Any = filled
        for part in key.split(".")[:-1]:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[name] = lookup(root, filled, key)
    return filled


def _as_dicts(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, dict):
        return {key: _as_dicts(item) for key, item in value.items()}
    return value
