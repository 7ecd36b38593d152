"""Keys that take the value of another key where they are null: validation, the tree that Hydra composes, the printed
defaults and comparisons of runs all read the sources declared here.

A source is a text with `${...}` references: `${a.b.c}` a key from the root, `${.c}` one of the same section,
`${..c}` one of the section around it.
"""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

from pydantic import BaseModel

from valor.config.tree import Key, fields, get_at, set_at

MAIN_TREE: list[type[BaseModel]] = []
"""The tree from whose defaults a section that is made alone inherits."""

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def absolute(source: str, name: str) -> str:
    """`.field` or `..field` written at the key `name` as a key from the root; others are returned unchanged."""
    levels = len(source) - len(source.lstrip("."))
    return ".".join([*name.split(".")[:-levels], source[levels:]]) if levels else source


def inherited_from(key: Key) -> str | None:
    """The source of `key`, its references from the root; None where it inherits nothing."""
    source = key.declared("inherits")
    return source and _REFERENCE.sub(lambda match: f"${{{absolute(match[1], key.name)}}}", source)


def single_source(key: Key) -> str | None:
    """The key whose value `key` takes unchanged, if there is one."""
    reference = _REFERENCE.fullmatch(inherited_from(key) or "")
    return reference and reference[1]


def fill_inherited(root: type[BaseModel], tree: dict[str, Any]) -> dict[str, Any]:
    """A copy of `tree` in which every inheriting key that is absent or null has its source's value."""
    absent = [name for name in _inheriting(root) if get_at(tree, name) is None]
    filled = deepcopy(tree) if absent else tree
    for name in absent:
        set_at(filled, name, lookup(root, filled, name))
    return filled


@cache
def _inheriting(root: type[BaseModel]) -> tuple[str, ...]:
    return tuple(name for name, key in fields(root).items() if key.declared("inherits"))


def lookup(root: type[BaseModel], tree: Mapping[str, Any], name: str) -> Any:
    """The value of the key `name`: from `tree`, else inherited, else its default in `root` or in the main tree."""
    value, key = get_at(tree, name), fields(root).get(name)
    if value is not None:
        return value
    if key is None:
        return lookup(MAIN_TREE[0], {}, name) if root is not MAIN_TREE[0] and name in fields(MAIN_TREE[0]) else None
    if source := single_source(key):
        value = lookup(root, tree, source)
    elif text := inherited_from(key):
        value = _REFERENCE.sub(lambda match: str(lookup(root, tree, match[1])), text)
    return key.default if value is None else value


def follows(root: type[BaseModel], name: str, trees: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a key has the value of the key that it inherits from in each of these flat trees of `root`."""
    source = single_source(fields(root)[name]) if name in fields(root) else None
    return source is not None and all(tree.get(name) == tree.get(source) for tree in trees)
