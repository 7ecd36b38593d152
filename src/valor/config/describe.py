"""Keys, values and mistakes in words: `integer > 0`, `= other.key`, `unknown key 'a': did you mean 'b'?`."""

import difflib
import json
import types
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic_core import ErrorDetails

from valor.config.base import as_path
from valor.config.inheritance import inherited_from, single_source
from valor.config.ppo import PPOConfig
from valor.config.presets import COMMANDS
from valor.config.tree import Key, below, fields, plain_keys, schema
from valor.errors import UserError, did_you_mean

_WORDS = {int: "integer", float: "number", bool: "true/false", str: "text", dict: "dict", type(None): "null"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def type_text(key: Key) -> str:
    """What `key` takes."""
    return _text(key.info.annotation, key.info.metadata)


def _text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _text(arguments[0], [*metadata, *arguments[1:]])
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        texts = [_text(part, () if part is type(None) else metadata) for part in arguments]
        return " or ".join(text for text in texts if f"{text} or a list of them" not in texts)
    if origin is list:
        return f"{_text(arguments[0])} or a list of them"
    if origin is tuple:
        word, *bounds = _text(arguments[0]).split(" ")
        return f"list of {len(arguments)} {' '.join([f'{word}s', *bounds])}"
    if any(isinstance(item, AfterValidator) and item.func is as_path for item in metadata):
        return "path"
    return _WORDS.get(origin or annotation, "value") + _bounds(metadata)


def _bounds(metadata: Sequence[Any]) -> str:
    flat = [part for item in metadata for part in getattr(item, "metadata", [item])]
    limits = {kind: getattr(item, kind) for item in flat for kind in _SIGNS if hasattr(item, kind)}
    if limits == {"ge": 0, "le": 1}:
        return " from 0 to 1"
    return " and".join(f" {sign} {limits[kind]}" for kind, sign in _SIGNS.items() if kind in limits)


def key_row(key: Key) -> tuple[str, str, str, str]:
    """Name, type, default (`= other.key` where it is inherited) and meaning."""
    choices = type_text(key).replace("one of ", "").replace(", ", "|")
    default = key.declared("derived") or show(key.default).strip("'")
    if source := inherited_from(key):
        default = f"= {single_source(key)}" if single_source(key) else source
    return key.name, choices, default, key.info.description or ""


def describe_keys(*words: str, root: type[BaseModel] = PPOConfig) -> str:
    """A line per key: key, type, default, meaning, of the keys below a prefix, or with all words in them.

    UserError: there is none.
    """
    prefixes, keys = [word.removesuffix(".") for word in words], plain_keys(root)
    texts = {key: f"{key.name} {key.info.description}".casefold() for key in keys}
    chosen = [key for key in keys if all(below(key.name, prefix) for prefix in prefixes)]
    chosen = chosen or [key for key in keys if all(word.casefold() in texts[key] for word in words)]
    if not chosen:
        raise UserError(unknown_key(root, " ".join(words)))
    rows = map(key_row, chosen)
    return "\n".join(f"{name:<68} {kind:<28} {default:<24} {doc}" for name, kind, default, doc in rows)


def describe_commands(*words: str) -> str:
    """`describe_keys` of `valor ppo`; then, below the name of each other command, of the keys that differ there.

    UserError: no command has such a key.
    """
    lines, mistakes = list[str](), list[str]()
    for command, root in COMMANDS.items():
        try:
            more = [line for line in describe_keys(*words, root=root).splitlines() if line not in lines]
        except UserError as error:
            mistakes.append(str(error))
        else:
            lines += [f"\nvalor {command}:", *more] if more and root is not PPOConfig else more
    if not lines:
        raise UserError(next((line for line in mistakes if "did you mean" in line), mistakes[0]))
    return "\n".join(lines).strip()


def show(value: Any) -> str:
    """A value as one would type it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return f"'{value}'"
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(root: type[BaseModel], key: str) -> list[str]:
    """At most three existing keys that `key` may have meant, best first.

    The first of these that gives any: keys that end with what was typed; keys of the same section with an abbreviated
    or similar last name; keys elsewhere with the same or the abbreviated last name; keys that look alike as a whole.
    """
    keys, (parent, _, last) = list(schema(root)), key.rpartition(".")
    initials = "".join(word[:1] for word in last.split("_"))
    last_names = {name: name.rpartition(".")[2] for name in keys}
    siblings = {short: name for name, short in last_names.items() if name == f"{parent}.{short}"}
    candidates = (
        [name for name in keys if name.endswith(f".{key}")]
        or [siblings[short] for short in {initials} & siblings.keys() or difflib.get_close_matches(last, siblings)]
        or difflib.get_close_matches(key, [name for name in keys if last_names[name] == last], cutoff=0.0)
        or [name for name in keys if last_names[name] == initials]
        or difflib.get_close_matches(key, keys, cutoff=0.75)
    )
    return candidates[:3]


def unknown_key(root: type[BaseModel], key: str) -> str:
    """One line about a key that does not exist."""
    near = nearest(root, key)
    if not near:
        return f"unknown key '{key}': see `valor config keys`"
    quoted = [f"'{name}'" for name in near]
    choice = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
    return f"unknown key '{key}': did you mean {choice}?"


def describe_errors(root: type[BaseModel], error: ValidationError, set_keys: Collection[str]) -> dict[str, str]:
    """A line about each wrong key; a key that only inherited a wrong value is left out."""
    wrong: dict[str, ErrorDetails] = {}
    for detail in error.errors(include_url=False):
        wrong.setdefault(_key_of(root, detail["loc"]), detail)
    sources = {key: single_source(fields(root)[key]) for key in wrong if key in fields(root)}
    first = [key for key in wrong if key in set_keys or sources.get(key) not in wrong]
    return {key: _line(root, key, wrong[key]) for key in first}


def _key_of(root: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """The longest leading part of a pydantic location that is a key (the rest are union branches and indices), and
    of an unknown key the part after that."""
    names = [str(part) for part in location]
    end = max((length for length in range(1, len(names) + 1) if ".".join(names[:length]) in fields(root)), default=0)
    key = fields(root).get(".".join(names[:end]))
    return ".".join(names[:end] if key is not None and key.section is None else names[: end + 1])


def _line(root: type[BaseModel], name: str, detail: ErrorDetails) -> str:
    key, value, location = schema(root).get(name), detail["input"], ".".join(map(str, detail["loc"]))
    if key is not None and get_origin(key.info.annotation) is dict and location != name:  # entries of a user's naming
        if detail["type"] == "model_type":
            entry_key = location.removeprefix(f"{name}.")
            return f"{location}: got {show(value)}, but each entry has a name: write {name}.NAME.{entry_key}"
        message = detail["msg"] if detail["type"] != "extra_forbidden" else "there is no such key"
        return f"{location}: {message[0].lower()}{message[1:]}, got {show(value)}"
    if detail["type"] == "extra_forbidden" or key is None:
        return unknown_key(root, name)
    if key.section is not None:
        return not_a_section(name, value)
    if detail["type"] == "value_error":
        return f"{name}: {detail['ctx']['error']}"  # type: ignore[typeddict-item]
    allowed = detail.get("ctx", {}).get("expected", "") if detail["type"] == "literal_error" else ""
    options = [option.strip("' ") for option in str(allowed).replace(" or ", ",").split(",")]
    return f"{name}: expected {type_text(key)}, got {show(value)}{did_you_mean(str(value), options, cutoff=0.7)}"


def not_a_section(key: str, value: Any) -> str:
    """One line about a section that was given a single value."""
    return f"{key}: is a section, got {show(value)}: set its keys (see `valor config keys {key}`)"
