"""From a command line to one plain tree, by Hydra's compose API: nothing is written to disk."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from yaml import YAMLError

from valor.config.command_line import CommandLine, Job, literal
from valor.config.mistakes import not_a_section, unknown_key
from valor.config.presets import DEFAULTS, config_nodes, default_tree
from valor.config.rules import Asked
from valor.config.tree import exists, flatten, get_at, is_open, is_section, plain_keys
from valor.config.verl import find_spelling
from valor.errors import UserError


@dataclass
class Reading:
    """What has been read of a command line so far: a tree, the keys that were set by an override or differ from the
    default, notes to print once, mistakes, and features that are asked for and not there."""

    tree: dict[str, Any] = field(default_factory=dict)
    set_keys: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    unavailable: Asked = field(default_factory=dict)


def compose_tree(
    root: type[BaseModel], line: CommandLine, overrides: Sequence[Override], job: Job | None, reading: Reading
) -> None:
    """Compose named configuration, yaml files and overrides into `reading`.

    A `job` of a multirun gets its label appended to the run's name and folder, where these are not swept themselves.
    UserError: what was wrong so far, and no such configuration, malformed yaml, or an override that Hydra refuses.
    """
    store_configs(root)
    name = line.config_name or DEFAULTS[root]
    try:
        with _initialized(line.config_path):
            texts = _for_hydra(root, overrides, reading)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                config = compose(config_name=name.removesuffix(".yaml"), overrides=texts)
            reading.notes += [_first_line(warning.message) for warning in caught]
            if job is not None:
                _relabel(root, config, job)
            written = flatten(OmegaConf.to_container(config, resolve=False))
            missing = [f"{key}: has no value yet (???)" for key, value in written.items() if value == "???"]
            if missing:
                raise UserError("\n".join(missing))
            defaults = default_tree(root)
            reading.set_keys = {key for key, value in written.items() if value != get_at(defaults, key)}
            reading.set_keys |= _typed_keys(root, overrides)
            reading.tree = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    except (UserError, YAMLError, OmegaConfBaseException, HydraException) as error:
        raise UserError("\n".join([*reading.mistakes, _one_line(error, line, name, root)])) from error


@cache
def store_configs(root: type[BaseModel]) -> None:
    """Put the tree's named configurations where Hydra and `defaults:` lists find them (once per process)."""
    for name, node in config_nodes(root).items():
        ConfigStore.instance().store(name=name, node=node)


@contextmanager
def _initialized(config_path: str | None) -> Iterator[None]:
    if config_path is None:
        with initialize(config_path=None, version_base="1.3"):
            yield
        return
    folder = Path(config_path).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"--config-path {config_path}: there is no such folder")
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        yield


def _one_line(error: Exception, line: CommandLine, name: str, root: type[BaseModel]) -> str:
    file = f"{line.config_path or '.'}/{name.removesuffix('.yaml')}.yaml"
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, YAMLError):
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        return f"{file}{place}: not valid yaml ({getattr(error, 'problem', None) or error})"
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key + ': ' if error.full_key else ''}{_first_line(error)}"
    if isinstance(error, MissingConfigException):
        if error.missing_cfg_file not in (name, name.removesuffix(".yaml")):
            return f"{file}: {_first_line(error)}"
        known = f"there is no configuration '{name}': built in are {', '.join(config_nodes(root))}"
        if line.config_path is None:
            return f"{known}; for a yaml file of your own add --config-path DIR"
        found = sorted(path.stem for path in Path(line.config_path).expanduser().glob("*.yaml"))
        return f"{known}; {line.config_path} has {', '.join(found) or 'no yaml file'}"
    if "must be a DictConfig" in str(error):
        return f"{file}: must hold keys, such as trainer: {{seed: 1}}"
    return " ".join(text.strip() for text in str(error).splitlines()[:2])


def _first_line(error: Exception | Warning | str) -> str:
    return next((text.strip() for text in str(error).splitlines() if text.strip()), "")


def _for_hydra(root: type[BaseModel], overrides: Sequence[Override], reading: Reading) -> list[str]:
    """Overrides as Hydra shall see them: values are force-added, so that unknown keys are collected, not raised."""
    mistakes = reading.mistakes
    texts: list[str] = []
    for override in overrides:
        key, text = override.key_or_group, override.input_line or ""
        if key == "hydra" or key.startswith("hydra."):
            reading.notes.append(f"{key} has no effect: Valor composes with Hydra but writes nothing through it")
        elif _is_group(key) or override.package is not None:
            texts.append(text)
        elif override.is_delete():
            if override.value() is not None:
                mistakes.append(f"cannot read '{text}': write ~{key} alone")
            elif exists(root, key):
                texts += _resets(root, key) or [text]
            else:
                mistakes.append(unknown_key(root, key))
        elif override.is_sweep_override():
            mistakes.append(f"{key} has several values: add -m to run each, or write a [list] or a 'quoted text'")
        elif is_section(root, key) and not _may_replace(root, override):
            mistakes.append(not_a_section(key, override.value()))
        elif _below_value(root, key):
            mistakes.append(f"unknown key '{key}': '{_below_value(root, key)}' is a value, it has no keys of its own")
        else:
            texts.append(f"++{key}={override.get_value_element_as_str()}")
    return texts


def _resets(root: type[BaseModel], key: str) -> list[str]:
    """Overrides that put `key`, or every key of that section, back to its default; none inside open dicts."""
    defaults = flatten(default_tree(root))
    return [
        f"++{name}={literal(value)}" for name, value in defaults.items() if name == key or name.startswith(f"{key}.")
    ]


def _may_replace(root: type[BaseModel], override: Override) -> bool:
    """A section can be given as a dict of its keys, or by a value that is an alias for one of them."""
    value = override.value()
    return isinstance(value, dict) or find_spelling(root, override.key_or_group, value) is not None


def _is_group(key: str) -> bool:
    loader = GlobalHydra.instance().config_loader()
    return "." not in key and bool(loader.get_group_options(key))


def _below_value(root: type[BaseModel], name: str) -> str | None:
    """The plain key of which `name` would be a part, as `trainer.logger` of `trainer.logger.console`."""
    around = [key for key in plain_keys(root) if name.startswith(f"{key.name}.")]
    return around[0].name if around and not is_open(root, name) else None


def _relabel(root: type[BaseModel], config: DictConfig, job: Job) -> None:
    """Give a job of a multirun a name and, where the folder does not follow the name, a folder of its own."""
    name_key, folder_key = "trainer.experiment_name", "trainer.default_local_dir"
    written = flatten(OmegaConf.to_container(config, resolve=False))
    name, folder = written.get(name_key, get_at(default_tree(root), name_key)), written.get(folder_key)
    if name_key not in job.swept:
        OmegaConf.update(config, name_key, f"{name}-{job.label}", force_add=True)
    if folder is not None and folder_key not in job.swept and f"${{{name_key}}}" not in str(folder):
        OmegaConf.update(config, folder_key, f"{folder}/{job.label}", force_add=True)


def _typed_keys(root: type[BaseModel], overrides: Sequence[Override]) -> set[str]:
    keys: set[str] = set()
    for override in overrides:
        if override.is_delete() or override.is_sweep_override():
            continue
        value = override.value()
        inner = flatten(value) if is_section(root, override.key_or_group) and isinstance(value, dict) else None
        keys |= {f"{override.key_or_group}.{key}" for key in inner} if inner else {override.key_or_group}
    return keys
