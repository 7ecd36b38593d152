"""From a command line to one plain tree in the schema's terms: Hydra composes it (and writes nothing to disk), and
verl's spellings in it are read as the keys that they mean."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra import compose, initialize, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from yaml import YAMLError

from valor.config.command_line import SWEEPS, literal
from valor.config.describe import not_a_section, show, unknown_key
from valor.config.presets import DEFAULTS, PRESETS, config_nodes, default_tree
from valor.config.tree import exists, flatten, get_at, is_open, is_section, plain_keys, set_at
from valor.config.verl import SPELLINGS, Spelling, find_spelling
from valor.errors import UserError


@dataclass
class Reading:
    """What has been read so far: a tree, the keys that were set by an override or differ from the default, notes to
    print once, and mistakes."""

    overrides: Sequence[Override]
    mistakes: list[str]
    tree: dict[str, Any] = field(default_factory=dict)
    set_keys: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    presets: dict[str, list[str]] = field(default_factory=dict)  # of each built-in one, the keys that it decides


def compose_tree(root: type[BaseModel], line: SimpleNamespace, reading: Reading) -> None:
    """Compose named configuration, yaml files and overrides into `reading`.

    UserError: what was wrong so far, and no such configuration, malformed yaml, or an override that Hydra refuses.
    """
    name = (line.config_name or DEFAULTS[root]).removesuffix(".yaml")
    folder = Path(line.config_path).expanduser().resolve() if line.config_path is not None else None
    _store(root, folder)
    try:
        if folder is not None and not folder.is_dir():
            raise UserError(f"--config-path {line.config_path}: there is no such folder")
        with initialize_config_dir(str(folder), version_base="1.3") if folder else initialize(None, version_base="1.3"):
            texts = _for_hydra(root, reading)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                config = compose(config_name=name, overrides=texts)
            reading.notes += [_first_line(warning.message) for warning in caught]
            chosen = GlobalHydra.instance().config_loader().compute_defaults_list(name, [], RunMode.RUN).defaults
            used = [one.config_path for one in chosen if f"{one.config_path}.yaml" in ConfigStore.instance().repo]
            written, defaults = flatten(OmegaConf.to_container(config, resolve=False)), flatten(default_tree(root))
            missing = [f"{key}: has no value yet (???)" for key, value in written.items() if value == "???"]
            if missing:
                raise UserError("\n".join(missing))
            reading.set_keys = {key for key, value in written.items() if value != defaults.get(key)}
            for override in reading.overrides:
                if not override.is_delete():
                    reading.set_keys |= flatten(override.value(), f"{override.key_or_group}.").keys()
            reading.tree = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
            for preset in (one for one in used if one in PRESETS):
                of_preset = PRESETS[preset][1].items()
                reading.presets[preset] = [key for key, value in of_preset if written.get(key) == value]
    except (UserError, YAMLError, UnicodeDecodeError, OmegaConfBaseException, HydraException) as error:
        raise UserError("\n".join([*reading.mistakes, _one_line(error, line, name, root)])) from error


def _store(root: type[BaseModel], folder: Path | None) -> None:
    """Tell Hydra the named configurations of a tree, but for those that a file of the user's own takes the place of."""
    for name, node in config_nodes(root).items():
        ConfigStore.instance().repo.pop(f"{name}.yaml", None)
        if folder is None or not (folder / f"{name}.yaml").is_file():
            ConfigStore.instance().store(name=name, node=node)


def _one_line(error: Exception, line: SimpleNamespace, name: str, root: type[BaseModel]) -> str:
    file = f"{line.config_path or '.'}/{name}.yaml"
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, YAMLError | UnicodeDecodeError):
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        return f"{file}{place}: not valid yaml ({getattr(error, 'problem', None) or error})"
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key + ': ' if error.full_key else ''}{_first_line(error)}"
    if isinstance(error, MissingConfigException):
        if error.missing_cfg_file != name:
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


def _for_hydra(root: type[BaseModel], reading: Reading) -> list[str]:
    """Overrides as Hydra shall see them: values are force-added, so that unknown keys are collected, not raised."""
    mistakes, defaults = reading.mistakes, flatten(default_tree(root))
    groups = GlobalHydra.instance().config_loader()
    texts: list[str] = []
    for override in reading.overrides:
        key, text, value = override.key_or_group, override.input_line or "", override.value()
        leaf = next((one.name for one in plain_keys(root) if key.startswith(f"{one.name}.")), None)
        if key.partition(".")[0] == "hydra":
            reading.notes.append(f"{key} has no effect: Valor composes with Hydra but writes nothing through it")
        elif override.package is not None or ("." not in key and groups.get_group_options(key)):
            texts.append(text)
        elif override.is_delete() and value is not None:
            mistakes.append(f"cannot read '{text}': write ~{key} alone")
        elif override.is_delete() and not exists(root, key):
            mistakes.append(unknown_key(root, key))
        elif override.is_delete():  # of an open dict it takes the entry away, elsewhere it restores the default
            below = {name: default for name, default in defaults.items() if f"{name}.".startswith(f"{key}.")}
            texts += [f"++{name}={literal(default)}" for name, default in below.items()] or [text]
        elif override.is_sweep_override():
            mistakes.append(f"{key} has several values: write a [list] or a 'quoted text'; {SWEEPS}")
        elif is_section(root, key) and not isinstance(value, dict) and find_spelling(root, key, value) is None:
            mistakes.append(not_a_section(key, value))
        elif leaf is not None and not is_open(root, key):
            mistakes.append(f"unknown key '{key}': '{leaf}' is a value, it has no keys of its own")
        else:
            texts.append(f"++{key}={override.get_value_element_as_str()}")
    return texts


def translate(root: type[BaseModel], reading: Reading) -> None:
    """Leave real keys alone in the reading's tree, and put the rest through the table of spellings."""
    rest: dict[str, Any] = {}
    reading.set_keys = {key for key in reading.set_keys if exists(root, key)}
    reading.tree = _known(root, reading.tree, "", rest, reading)
    for key, value in rest.items():
        _translate_key(root, key, value, reading)


def _known(
    root: type[BaseModel], tree: dict[str, Any], prefix: str, rest: dict[str, Any], reading: Reading
) -> dict[str, Any]:
    """The part of `tree` that the schema has; the other plain keys go into `rest`."""
    known: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if is_section(root, key) and isinstance(value, dict):
            known[name] = _known(root, value, f"{key}.", rest, reading)
        elif exists(root, key) and not (is_section(root, key) and find_spelling(root, key, value)):
            known[name] = _meant(key, value, reading)
        else:
            rest |= flatten(value, f"{key}.")
    return known


def _meant(key: str, value: Any, reading: Reading) -> Any:
    for one in SPELLINGS:
        if one.value is not None and one.match(key, value) is not None:
            if key in reading.set_keys:
                reading.notes.append(f"{key}={value} is read as {one.value}{one.why}")
            return one.value
    return value


def _translate_key(root: type[BaseModel], key: str, value: Any, reading: Reading) -> None:
    rule = find_spelling(root, key, value)
    if rule is None:
        reading.mistakes.append(unknown_key(root, key))
        return
    spelling, target = rule
    if value is None:
        return
    if target is not None:
        _move(root, key, target, value, spelling, reading)
    elif not spelling.refused:
        reading.notes.append(f"{key} has no effect: {spelling.reason}")
    elif spelling.only or value not in (False, {}):
        reading.mistakes.append(f"{key}={show(value)} asks for what Valor does not have: {spelling.reason}")


def _move(root: type[BaseModel], key: str, target: str, value: Any, spelling: Spelling, reading: Reading) -> None:
    value = _meant(target, value, reading)
    if target in reading.set_keys and get_at(reading.tree, target) != value:
        there = get_at(reading.tree, target)
        reading.mistakes.append(
            f"{key}={show(value)} and {target}={show(there)} are the same setting: give one of them"
        )
        return
    _set(root, target, value, reading)
    reading.set_keys.add(target)
    reading.notes.append(f"{key} is read as {target}{spelling.why}")


def _set(root: type[BaseModel], target: str, value: Any, reading: Reading) -> None:
    """With the keys that inherit it, as far as they are not set themselves."""
    set_at(reading.tree, target, value)
    for one in plain_keys(root):
        if one.inherits == target and one.name not in reading.set_keys:
            _set(root, one.name, value, reading)
