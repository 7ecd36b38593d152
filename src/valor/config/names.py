"""Which keys there are, and which one was meant."""

from __future__ import annotations

import difflib
from functools import cache

from pydantic import BaseModel

from valor.config.tree import walk_keys


@cache
def all_keys(root: type[BaseModel]) -> tuple[str, ...]:
    """Every plain key and every section, from the root."""
    keys: dict[str, None] = {}
    for key, _, _ in walk_keys(root):
        names = key.split(".")
        keys |= dict.fromkeys(".".join(names[:length]) for length in range(1, len(names) + 1))
    return tuple(keys)


def nearest(root: type[BaseModel], key: str, limit: int = 3) -> list[str]:
    """Existing keys that `key` may have meant, best first.

    In this order: keys that end with what was typed; keys of the same section with a similar or abbreviated last
    name; keys elsewhere with the same or an abbreviated last name; keys that look alike as a whole.
    """
    keys = all_keys(root)
    parent, _, last = key.rpartition(".")
    suffix = [k for k in keys if k.endswith(f".{key}")]
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == parent}
    similar = [siblings[name] for name in difflib.get_close_matches(last, siblings, n=limit, cutoff=0.6)]
    initials = "".join(word[0] for word in last.split("_") if word)
    abbreviated = [siblings[initials]] if initials in siblings and len(initials) > 1 else []
    elsewhere = [k for k in keys if len(initials) > 1 and k.rpartition(".")[2] == initials]
    same_last = difflib.get_close_matches(key, [k for k in keys if k.rpartition(".")[2] == last], n=limit, cutoff=0.0)
    alike = difflib.get_close_matches(key, keys, n=limit, cutoff=0.75)
    found = suffix or (abbreviated + similar) or same_last or elsewhere or alike
    return list(dict.fromkeys(found))[:limit]


def unknown_key(root: type[BaseModel], key: str) -> str:
    """One line about a key that does not exist."""
    near = nearest(root, key)
    if not near:
        return f"unknown key '{key}': see `valor config keys`"
    quoted = [f"'{name}'" for name in near]
    choice = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
    return f"unknown key '{key}': did you mean {choice}?"
