"""Keys by their dotted names: walking the schema and plain trees, and the values that keys inherit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_origin

from pydantic import BaseModel

REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def section_type(cls: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The section class of field `name`, or None if the field is a plain key."""
    annotation = cls.model_fields[name].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def walk_keys(root: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel], str]]:
    """Every plain key below `root` as (dotted key, section class, field name), in declaration order."""
    for name in root.model_fields:
        section = section_type(root, name)
        if section is None:
            yield prefix + name, root, name
        else:
            yield from walk_keys(section, f"{prefix}{name}.")


def find_field(root: type[BaseModel], key: str) -> tuple[type[BaseModel], str] | None:
    """The section class and field name of a dotted key, or None if the tree has no such key."""
    *parents, last = key.split(".")
    section: type[BaseModel] | None = root
    for name in parents:
        if section is None or name not in section.model_fields:
            return None
        section = section_type(section, name)
    return (section, last) if section is not None and last in section.model_fields else None


def is_open(root: type[BaseModel], key: str) -> bool:
    """Whether `key` lies inside an open dict or a section that takes any key (third-party options)."""
    *parents, _ = key.split(".")
    section = root
    for name in parents:
        if name not in section.model_fields:
            break
        inner = section_type(section, name)
        if inner is None:
            return get_origin(section.model_fields[name].annotation) is dict
        section = inner
    return section.model_config.get("extra") == "allow"


def is_section(root: type[BaseModel], key: str) -> bool:
    """Whether `key` names a section rather than a plain key."""
    found = find_field(root, key)
    return found is not None and section_type(*found) is not None


def exists(root: type[BaseModel], key: str) -> bool:
    """Whether `key` is a section, a plain key, or inside an open dict."""
    return find_field(root, key) is not None or is_open(root, key)


def declared(cls: type[BaseModel], name: str, what: str) -> Any:
    """What `key(what=...)` says about field `name`, or None."""
    extra = cls.model_fields[name].json_schema_extra
    return extra.get(what) if isinstance(extra, dict) else None


def get_at(tree: Any, key: str) -> Any:
    """The value at a dotted key of nested dicts, or None."""
    for name in key.split("."):
        if not isinstance(tree, dict):
            return None
        tree = tree.get(name)
    return tree


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as dotted keys; empty dicts stay values."""
    if not isinstance(tree, dict) or not tree:
        return {prefix[:-1]: tree} if prefix else {}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.")
    return flat


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        node = tree
        *parents, last = key.split(".")
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return tree


def absolute(source: str, key: str) -> str:
    """`.name` written at `key` as a key from the root; other references are returned unchanged."""
    return f"{key.rpartition('.')[0]}{source}".removeprefix(".") if source.startswith(".") else source


def inherited_from(cls: type[BaseModel], name: str) -> str | None:
    """What field `name` inherits from, or None."""
    return declared(cls, name, "inherits")


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
