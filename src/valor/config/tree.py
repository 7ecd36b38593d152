"""Keys by their dotted names: the schema, plain trees, and the values that keys inherit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class Key:
    """A key or a section of a tree: its dotted `name` and the `owner` that declares it as `field`."""

    name: str
    owner: type[BaseModel]
    field: str

    @property
    def info(self) -> FieldInfo:
        return self.owner.model_fields[self.field]

    @property
    def section(self) -> type[BaseModel] | None:
        """The class of a section, None of a plain key."""
        annotation = self.info.annotation
        return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None

    def declared(self, what: str) -> Any:
        """What the field's `key(what=...)` says, or None."""
        extra = self.info.json_schema_extra
        return extra.get(what) if isinstance(extra, dict) else None

    @property
    def inherits(self) -> str | None:
        """The key whose value this one takes where it is null, or a text with `${keys}`; all from the root."""
        source = self.declared("inherits")
        if source is None or "${" not in source:
            return source and absolute(source, self.name)
        return REFERENCE.sub(lambda match: f"${{{absolute(match[1], self.name)}}}", source)


def absolute(source: str, name: str) -> str:
    """`.field` written at the key `name` as a key from the root; other references are returned unchanged."""
    return f"{name.rpartition('.')[0]}{source}".removeprefix(".") if source.startswith(".") else source


@cache
def schema(root: type[BaseModel], prefix: str = "") -> dict[str, Key]:
    """Every section and plain key below `root` by its dotted name, in declaration order, a section before its keys."""
    found: dict[str, Key] = {}
    for field in root.model_fields:
        key = found[prefix + field] = Key(prefix + field, root, field)
        if key.section is not None:
            found |= schema(key.section, f"{prefix}{field}.")
    return found


def plain_keys(root: type[BaseModel]) -> list[Key]:
    """The keys without the sections."""
    return [key for key in schema(root).values() if key.section is None]


def is_open(root: type[BaseModel], name: str) -> bool:
    """Whether `name` lies inside an open dict or a section that takes any key (third-party options)."""
    parents = name.split(".")[:-1]
    around = [schema(root)[place] for i in range(len(parents)) if (place := ".".join(parents[: i + 1])) in schema(root)]
    if not around:
        return False
    section, annotation = around[-1].section, around[-1].info.annotation
    return get_origin(annotation) is dict if section is None else section.model_config.get("extra") == "allow"


def is_section(root: type[BaseModel], name: str) -> bool:
    """Whether `name` is a section rather than a plain key."""
    return name in schema(root) and schema(root)[name].section is not None


def exists(root: type[BaseModel], name: str) -> bool:
    """Whether `name` is a section, a plain key, or inside an open dict."""
    return name in schema(root) or is_open(root, name)


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


def lookup(root: type[BaseModel], tree: dict[str, Any], name: str) -> Any:
    """The value of the key `name`: from `tree`, else inherited, else the field's default."""
    value, key = get_at(tree, name), schema(root).get(name)
    if value is not None or key is None:
        return value
    source = key.inherits
    if source is None:
        return key.info.get_default(call_default_factory=True)
    if "${" in source:
        return REFERENCE.sub(lambda match: str(lookup(root, tree, match[1])), source)
    return lookup(root, tree, source)


def fill_inherited(root: type[BaseModel], tree: dict[str, Any]) -> dict[str, Any]:
    """A copy of `tree` in which every inheriting key that is absent or null has its source's value.

    Sections given as model objects are copied as dicts of what was set on them.
    """
    filled = _as_dicts(tree)
    for name in (key.name for key in plain_keys(root) if key.inherits):
        if get_at(filled, name) is not None:
            continue
        *parents, last = name.split(".")
        node: Any = filled
        for part in parents:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[last] = lookup(root, filled, name)
    return filled


def _as_dicts(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, dict):
        return {key: _as_dicts(item) for key, item in value.items()}
    return value
