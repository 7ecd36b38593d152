"""Values as JSON, and back: what travels between tests and the code under test.

Rebuilding makes Python's own types and, from their attributes, classes that the reader names; nothing that the text
says is looked up or run. Standard library only, and few imports, as in `payload`.
"""

from __future__ import annotations

import builtins
import json

TYPE_CHECKING = False  # the typing module costs more than all the rest of this file
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

_BUILTIN_TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
_COLLECTIONS = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DECODERS = {
    **_COLLECTIONS, "dict": dict, "bytes": bytes.fromhex, "complex": complex, "type": _BUILTIN_TYPES.__getitem__
}  # fmt: skip
# Values that travel as a text or a list, and what reads them.
_STANDARD = {
    **dict.fromkeys(("datetime.date", "datetime.datetime", "datetime.time"), "fromisoformat"),
    **dict.fromkeys(("decimal.Decimal", "fractions.Fraction", "collections.deque"), ""),
}


def refused(value: Any) -> Any:
    """The `target` of what may not travel."""
    raise TypeError(f"a test cannot send a {type(value).__name__} to the code under test")


def encode(value: Any, target: Callable[[Any], Any] = refused, classes: Collection[str] = ()) -> bytes:
    """Plain data as JSON: None, numbers, texts, bytes, collections, what subclasses any of these, Python's types, and
    a few values of its library; `[value, objects]`, the objects being instances of `classes`, which both sides have.

    What JSON does not know is an object with one entry, its type. `target` says what the other side knows any other
    object by, or raises TypeError.
    """
    objects: list[Any] = []
    numbers: dict[int, int] = {}

    def plain(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
        if isinstance(value, tuple) and isinstance(fields := getattr(value, "_fields", None), tuple):
            return {"namedtuple": [type(value).__name__, list(fields), [plain(item) for item in value]]}
        for name, kind in _COLLECTIONS.items():
            if isinstance(value, kind):
                return {name: [plain(item) for item in value]}
        if isinstance(value, bytes | bytearray):
            return {"bytes": value.hex()}
        if isinstance(value, complex):
            return {"complex": repr(value)}
        if (name := f"{type(value).__module__}.{type(value).__name__}") in _STANDARD:
            return {name: [plain(item) for item in value] if name == "collections.deque" else str(value)}
        if isinstance(value, type) and _BUILTIN_TYPES.get(value.__name__) is value:
            return {"type": value.__name__}
        if type(value).__name__ in classes and hasattr(value, "__dict__"):
            if id(value) not in numbers:
                numbers[id(value)] = len(objects)
                objects.append(value)
            return {"object": numbers[id(value)]}
        if callable(to_list := getattr(type(value), "tolist", None)):  # numpy
            return plain(to_list(value))
        return {"remote": target(value)}

    root = plain(value)
    return json.dumps([root, [[type(value).__name__, plain(vars(value))] for value in objects]]).encode()


def decode(data: bytes, resolve: Callable[[Any], Any], classes: Callable[[str], type] | None = None) -> Any:
    """Rebuilds the value; `resolve` gives the object for a name or a handle, `classes` the class of an object. Raises
    Exception for anything else."""
    root, parts = json.loads(data)
    objects = [object.__new__(classes(name)) for name, _ in parts] if classes else []

    def rebuild(part: Any) -> Any:
        if isinstance(part, list):
            return [rebuild(item) for item in part]
        if not isinstance(part, dict):
            return part
        [(name, content)] = part.items()
        if name in ("remote", "object"):
            return resolve(content) if name == "remote" else objects[content]
        content = rebuild(content)
        if name == "namedtuple":
            return __import__("collections").namedtuple(*content[:2])(*content[2])
        if name in _STANDARD:
            module, _, kind = name.partition(".")
            kind = getattr(__import__(module), kind)
            return getattr(kind, _STANDARD[name])(content) if _STANDARD[name] else kind(content)
        return _DECODERS[name](content)

    for value, (_, attributes) in zip(objects, parts, strict=True):
        vars(value).update(rebuild(attributes))
    return rebuild(root)
