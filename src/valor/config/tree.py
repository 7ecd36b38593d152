"""Walking the schema and plain trees by dotted keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_origin

from pydantic import BaseModel


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
