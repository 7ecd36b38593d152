"""From what was typed to a validated configuration, or to all mistakes, one line each."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from omegaconf import OmegaConf
from pydantic import ValidationError

from valor.config.base import Section
from valor.config.command_line import parse_overrides, read_arguments
from valor.config.composition import Reading, compose_tree, translate
from valor.config.describe import describe_errors, wrong_keys
from valor.config.ppo import PPOConfig
from valor.config.rules import contradictions
from valor.config.tree import without
from valor.errors import UserError

Root = TypeVar("Root", bound=Section)


@dataclass(frozen=True)
class LoadedConfig(Generic[Root]):
    """A validated tree and how it came about.

    explicit_keys: keys set by an override, or by a yaml file to something other than the default.
    notes: what to tell the user once (aliases that were read, settings without effect).
    presets: of each built-in named configuration that was asked for, the keys whose values are its own.
    """

    config: Root
    explicit_keys: frozenset[str] = frozenset()
    dry_run: bool = False
    notes: tuple[str, ...] = ()
    presets: Mapping[str, Sequence[str]] = field(default_factory=dict)


def load(
    argv: Sequence[str], root: type[Root] = PPOConfig, check: Callable[[Root], list[str]] | None = None
) -> LoadedConfig[Root]:
    """The configuration that a command line asks for. UserError: every mistake in it, one line each.

    `check` is asked for the mistakes that a valid tree still has in the eyes of those who act on it, a line each.
    """
    line = read_arguments(argv)
    reading = Reading(*parse_overrides(line.overrides))
    compose_tree(root, line, reading)
    translate(root, reading)
    mistakes, wrong = reading.mistakes, list[str]()
    try:
        config = root.model_validate(reading.tree)
    except ValidationError as error:
        mistakes += describe_errors(root, error, reading.set_keys)
        wrong = wrong_keys(root, error)
        try:  # with their defaults, to see what else is wrong
            config = root.model_validate(without(reading.tree, wrong))
        except ValidationError:
            raise UserError("\n".join(dict.fromkeys(mistakes))) from error
    found = [*contradictions(config), *(check(config) if check is not None else [])]
    mistakes += [line for line in found if not any(key in line for key in wrong)]
    if mistakes:
        raise UserError("\n".join(dict.fromkeys(mistakes)))
    notes = tuple(dict.fromkeys(reading.notes))
    return LoadedConfig(config, frozenset(reading.set_keys), line.dry_run, notes, reading.presets)


def dump_yaml(config: Section) -> str:
    """Every key with its value; --config-path and --config-name read it back to an equal tree."""
    text = json.dumps(config.model_dump(mode="json"))
    tree = json.loads(text.replace("${", r"\\${"))  # protected, so that it is not taken for an interpolation
    return OmegaConf.to_yaml(OmegaConf.create(tree))
