"""What follows from the rules on keys and sections: contradictions, and settings without effect."""

from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any

from valor.config.base import Section, is_set
from valor.config.describe import show
from valor.config.tree import absolute, schema


def contradictions(section: Section, at: str = "") -> list[str]:
    """What `section` and those below it find in themselves; one that is off (`enable`: false) is not asked."""
    if getattr(section, "enable", True) is False:
        return []
    lines = [*section.contradictions(at)]
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            lines += contradictions(value, f"{at}{name}.")
    return lines


def inert_settings(config: Section, explicit_keys: Collection[str]) -> dict[str, str]:
    """Those of `explicit_keys` that change nothing in this run, each with the reason."""
    reasons = {key: next(_reasons(config, key), None) for key in sorted(explicit_keys)}
    return {key: reason for key, reason in reasons.items() if reason is not None}


def _reasons(config: Section, key: str) -> Iterator[str]:
    """Why `key` has no effect, the outermost rule first; nothing where it has one."""
    for reason, patterns in config.unused().items():
        if any(fnmatchcase(key, pattern) for pattern in patterns.split()):
            yield f"no effect: {reason}"
    for condition, reason, place in conditions(type(config), key):
        alternatives = condition.split(" or ")
        asked = [_named(one, place) for one in alternatives]
        if key in asked or any(_holds(config, one, place) for one in alternatives):
            continue
        value, short = _value(config, asked[0]), ".".join(asked[0].split(".")[-2:])
        if reason or value is None:
            yield f"no effect: {reason or f'{short} is not set'}"
        else:
            yield f"no effect with {short}={_as_typed(value)}"


def conditions(root: type[Section], key: str) -> Iterator[tuple[str, str, str]]:
    """Every `only_with` on `key` and on the sections around it, as (condition, reason, the key where it stands)."""
    for place, one in schema(root).items():
        if f"{key}.".startswith(f"{place}."):
            for condition, reason in (one.declared("only_with") or {}).items():
                yield condition, reason, place


def _named(condition: str, place: str) -> str:
    """The key that a condition is about."""
    return absolute(condition.partition("=")[0].removesuffix("!"), place)


def _holds(config: Section, condition: str, place: str) -> bool:
    value = _value(config, _named(condition, place))
    left, equals, wanted = condition.partition("=")
    return (_as_typed(value) == wanted) != left.endswith("!") if equals else is_set(value)


def _as_typed(value: Any) -> str:
    return show(value).strip("'")


def _value(config: Section, key: str) -> Any:
    """None where this tree has no such key."""
    return reduce(lambda section, name: getattr(section, name, None), key.split("."), config)
