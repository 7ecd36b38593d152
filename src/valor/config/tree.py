"""Keys by their dotted names: the schema of a tree, and plain nested dicts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


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

    @property
    def default(self) -> Any:
        """The field's default; None where the value is another key's."""
        return self.info.get_default(call_default_factory=True)

    def declared(self, what: str) -> Any:
        """What the field's `key(what=...)` says, or None."""
        extra = self.info.json_schema_extra
        return extra.get(what) if isinstance(extra, dict) else None


@cache
def fields(root: type[BaseModel], prefix: str = "") -> dict[str, Key]:
    """Every section and field below `root` by its dotted name, in declaration order, a section before its fields."""
    every: dict[str, Key] = {}
    for name, info in root.model_fields.items():
        key = every[prefix + name] = Key(prefix + name, info)
        if key.section is not None:
            every |= fields(key.section, f"{prefix}{name}.")
    return every


@cache
def schema(root: type[BaseModel]) -> dict[str, Key]:
    """`fields` without those that no user sets: `hidden` ones, and sections of nothing else."""
    visible = [key.name for key in fields(root).values() if key.section is None and not key.declared("hidden")]
    sections = {name[:end] for name in visible for end, char in enumerate(name) if char == "."}
    return {name: key for name, key in fields(root).items() if name in sections or name in visible}


def plain_keys(root: type[BaseModel]) -> list[Key]:
    """The keys without the sections."""
    return [key for key in schema(root).values() if key.section is None]


def is_open(root: type[BaseModel], name: str) -> bool:
    """Whether `name` lies inside an open dict (third-party options)."""
    while "." in name:
        name = name.rpartition(".")[0]
        if around := schema(root).get(name):
            return get_origin(around.info.annotation) is dict
    return False


def is_section(root: type[BaseModel], name: str) -> bool:
    """Whether `name` is a section rather than a plain key."""
    return name in schema(root) and schema(root)[name].section is not None


def exists(root: type[BaseModel], name: str) -> bool:
    """Whether `name` is a section, a plain key, or inside an open dict."""
    return name in schema(root) or is_open(root, name)


def below(name: str, *prefixes: str) -> bool:
    """Whether the key `name` is one of the `prefixes`, or lies in a section of that name."""
    return f"{name}.".startswith(tuple(f"{prefix}." for prefix in prefixes))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether the last of the patterns that fit the key `name` takes it in; one after `!` leaves it out."""
    fits = [pattern for pattern in patterns if fnmatchcase(name, pattern.removeprefix("!"))]
    return bool(fits) and not fits[-1].startswith("!")


def get_at(tree: Any, key: str) -> Any:
    """The value at a dotted key of nested dicts and sections, or None."""
    for name in key.split("."):
        if isinstance(tree, BaseModel):
            tree = getattr(tree, name, None)
        else:
            tree = tree.get(name) if isinstance(tree, Mapping) else None
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


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        set_at(tree, key, value)
    return tree
