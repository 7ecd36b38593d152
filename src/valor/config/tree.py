"""Keys by their dotted names: the schema, plain trees, and the values that keys inherit."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class Key:
    """A key or a section of a tree: its dotted `name`, and its field in the class that declares it."""

    name: str
    info: FieldInfo

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
    for field, info in root.model_fields.items():
        key = found[prefix + field] = Key(prefix + field, info)
        if key.section is not None:
            found |= schema(key.section, f"{prefix}{field}.")
    return found


def plain_keys(root: type[BaseModel]) -> list[Key]:
    """The keys without the sections."""
    return [key for key in schema(root).values() if key.section is None]


def is_open(root: type[BaseModel], name: str) -> bool:
    """Whether `name` lies inside an open dict or a section that takes any key (third-party options)."""
    while "." in name:
        name = name.rpartition(".")[0]
        if around := schema(root).get(name):
            takes_any = around.section is not None and around.section.model_config.get("extra") == "allow"
            return takes_any or get_origin(around.info.annotation) is dict
    return False


def is_section(root: type[BaseModel], name: str) -> bool:
    """Whether `name` is a section rather than a plain key."""
    return name in schema(root) and schema(root)[name].section is not None


def exists(root: type[BaseModel], name: str) -> bool:
    """Whether `name` is a section, a plain key, or inside an open dict."""
    return name in schema(root) or is_open(root, name)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether the last of the patterns that fit the key `name` takes it in; one after `!` leaves it out."""
    fits = [pattern for pattern in patterns if fnmatchcase(name, pattern.removeprefix("!"))]
    return bool(fits) and not fits[-1].startswith("!")


def get_at(tree: Any, key: str) -> Any:
    """The value at a dotted key of nested dicts, or None."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def set_at(tree: dict[str, Any], key: str, value: Any) -> None:
    """Put a value at a dotted key of nested dicts; nothing happens where a plain value is in the way."""
    *parents, last = key.split(".")
    node: Any = tree
    for name in parents:
        node = node.setdefault(name, {}) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node[last] = value


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as dotted keys; empty dicts stay values."""
    if not isinstance(tree, dict) or not tree:
        return {prefix[:-1]: tree} if prefix else {}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.")
    return flat


def follows(root: type[BaseModel], name: str, trees: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a key has the value of the key that it inherits from in each of these flat trees of `root`."""
    source = schema(root)[name].inherits if name in schema(root) else None
    return source is not None and all(tree.get(name) == tree.get(source) for tree in trees)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        set_at(tree, key, value)
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
    for key in plain_keys(root):
        if key.inherits and get_at(filled, key.name) is None:
            set_at(filled, key.name, lookup(root, filled, key.name))
    return filled


def _as_dicts(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    return {key: _as_dicts(item) for key, item in value.items()} if isinstance(value, dict) else value
