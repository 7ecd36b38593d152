"""From what was typed to a validated configuration, or to all mistakes, a line each; and which settings do nothing."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from valor.config.base import Section, is_set
from valor.config.command_line import read_arguments
from valor.config.composition import read_tree
from valor.config.describe import describe_errors, show
from valor.config.inheritance import absolute
from valor.config.ppo import PPOConfig
from valor.config.tree import below, flatten, get_at, matches, nested, plain_keys, schema
from valor.errors import UserError

Root = TypeVar("Root", bound=Section)


@dataclass(frozen=True)
class LoadedConfig(Generic[Root]):
    """A validated tree and how it came about.

    explicit_keys: keys set by an override, or by a yaml file to something other than the default.
    notes: lines to print once (aliases that were read, settings without effect).
    presets: of each built-in named configuration that was asked for, the keys whose values are its own.
    """

    config: Root
    explicit_keys: frozenset[str] = frozenset()
    dry_run: bool = False
    notes: tuple[str, ...] = ()
    presets: Mapping[str, Sequence[str]] = field(default_factory=dict)


def load(
    argv: Sequence[str],
    root: type[Root] = PPOConfig,
    check: Callable[[Root], list[str]] | None = None,
    derive: Callable[[Root], Mapping[str, Any]] = lambda config: {},
) -> LoadedConfig[Root]:
    """The configuration that a command line asks for. UserError: every mistake in it, one line each.

    `check` finds the mistakes, a line each, that a valid tree still has for those who act on it. It imports torch and
    more, so that it is called only for a valid tree, and by --dry-run, which tells all mistakes at once. Before it
    `derive` gives values to keys that are null.
    """
    line = read_arguments(argv)
    reading = read_tree(root, line)
    mistakes, wrong = reading.mistakes, dict[str, str]()
    try:
        config = root.model_validate(reading.tree)
    except ValidationError as error:
        wrong = describe_errors(root, error, reading.set_keys)
        mistakes += wrong.values()
        try:  # with their defaults, to see what else is wrong
            chosen = reading.set_keys | {key.name for key in plain_keys(root) if key.declared("within")}
            flat = flatten(reading.tree).items()
            rest = {key: value for key, value in flat if key in chosen and not below(key, *wrong)}
            config = root.model_validate(nested(rest))
        except ValidationError:
            raise UserError("\n".join(dict.fromkeys(mistakes))) from error
    acting = line.dry_run or not mistakes
    derived = derive(config) if check is not None and acting else {}
    if derived := {key: value for key, value in derived.items() if get_at(reading.tree, key) is None}:
        config = root.model_validate(nested(flatten(config.model_dump()) | derived))
    more = contradictions(config) + (check(config) if check is not None and acting else [])
    mistakes += [mistake for mistake in more if not any(key in mistake for key in wrong)]
    if mistakes:
        raise UserError("\n".join(dict.fromkeys(mistakes)))
    notes = tuple(dict.fromkeys(reading.notes))
    return LoadedConfig(config, frozenset(reading.set_keys), line.dry_run, notes, reading.presets)


def dump_yaml(config: Section) -> str:
    """Every key with its value; --config-path and --config-name read it back to an equal tree."""
    text = json.dumps(config.model_dump(mode="json"))
    tree = json.loads(text.replace("${", r"\\${"))  # protected, so that it is not taken for an interpolation
    return yaml.dump(tree, Dumper=_Writer, sort_keys=False, allow_unicode=True)


class _Writer(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes a text that OmegaConf, unlike YAML, would read as a number: 1e5."""


def _text(writer: Any, text: str) -> Any:
    quotes = "'" if re.fullmatch(r"[-+]?[\d_.]+[eE][-+]?\d+", text) else None
    return writer.represent_scalar("tag:yaml.org,2002:str", text, quotes)


_Writer.add_representer(str, _text)


def load_yaml(text: str) -> Any:
    """Lists and dictionaries of YAML, in which 1e-5 is a number and no key is there twice. YAMLError: it is none."""
    try:
        return OmegaConf.to_container(OmegaConf.create(text))
    except OmegaConfBaseException as error:
        raise YAMLError(str(error).partition("\n")[0]) from None


def contradictions(config: Section) -> list[str]:
    """What the sections of a tree find in themselves, but for sections that are off and keys that this run ignores."""
    lines, off = [*config.contradictions("")], list[str]()
    for name in (key.name for key in schema(type(config)).values() if key.section is not None):
        section: Any = get_at(config, name)
        if getattr(section, "enable", True) is False:
            off.append(name)
        if not below(name, *off) and next(_reasons(config, f"{name}.*"), None) is None:
            named = {line: re.split("[ =]", line)[0] for line in section.contradictions(f"{name}.")}
            lines += [line for line, key in named.items() if next(_reasons(config, key), None) is None]
    return lines


def inert_settings(config: Section, explicit_keys: Collection[str]) -> dict[str, str]:
    """Those of `explicit_keys` that change nothing in this run, each with the reason."""
    reasons = {key: next(_reasons(config, key), None) for key in sorted(explicit_keys)}
    return {key: reason for key, reason in reasons.items() if reason is not None}


def _reasons(config: Section, key: str) -> Iterator[str]:
    """Why `key` has no effect, the outermost rule first; nothing where it has one."""
    for reason, patterns in config.unused().items():
        if matches(key, patterns.split()):
            yield f"no effect: {reason}"
    for condition, reason, rule_key in conditions(type(config), key):
        alternatives = condition.split(" or ")
        sources = [_named(alternative, rule_key) for alternative in alternatives]
        if key in sources or any(_holds(config, alternative, rule_key) for alternative in alternatives):
            continue
        value, short = get_at(config, sources[0]), ".".join(sources[0].split(".")[-2:])
        if reason or value is None:
            yield f"no effect: {reason or f'{short} is not set'}"
        else:
            yield f"no effect with {short}={_as_typed(value)}"


def conditions(root: type[Section], key: str) -> Iterator[tuple[str, str, str]]:
    """Every `only_with` on `key` and on the sections around it: condition, reason, the key whose rule it is."""
    parts, every = key.split("."), schema(root)
    for rule_key in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
        rules = every[rule_key].declared("only_with") if rule_key in every else None
        for condition, reason in (rules or {}).items():
            yield condition, reason, rule_key


def _named(condition: str, rule_key: str) -> str:
    """The key that a condition is about."""
    return absolute(condition.partition("=")[0].removesuffix("!"), rule_key)


def _holds(config: Section, condition: str, rule_key: str) -> bool:
    value = get_at(config, _named(condition, rule_key))
    left, equals, wanted = condition.partition("=")
    return (_as_typed(value) == wanted) != left.endswith("!") if equals else is_set(value)


def _as_typed(value: Any) -> str:
    return show(value).strip("'")
