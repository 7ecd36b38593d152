"""From a command line to one plain tree in the schema's terms: Hydra composes it (and writes nothing to disk), and
verl's spellings in it are read as the keys that they mean."""

import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import yaml
from hydra import compose, initialize, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from yaml import YAMLError

from valor.config.base import takes_texts
from valor.config.command_line import SWEEPS, parse_overrides
from valor.config.describe import not_a_section, show, unknown_key
from valor.config.inheritance import lookup
from valor.config.presets import ALGORITHMS, DEFAULTS, ESTIMATOR, PRESETS, config_nodes, default_tree
from valor.config.tree import (
    below,
    exists,
    fields,
    flatten,
    get_at,
    is_open,
    is_section,
    nested,
    plain_keys,
    schema,
    set_at,
)
from valor.config.verl import find_spelling
from valor.errors import UserError


@dataclass
class Reading:
    """A tree; its keys that were set by an override or differ from the default; notes to print once; mistakes."""

    tree: dict[str, Any] = field(default_factory=dict)
    set_keys: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    presets: dict[str, list[str]] = field(default_factory=dict)  # by preset, the keys that it decides
    typed: set[str] = field(default_factory=set)  # keys of overrides, as they were spelled


def read_tree(root: type[BaseModel], line: SimpleNamespace) -> Reading:
    """Compose the named configuration, yaml files and overrides.

    UserError: no such configuration, malformed yaml, a wrong reference; with the mistakes that were found before.
    """
    overrides, mistakes = parse_overrides(line.overrides)
    reading = Reading(mistakes=mistakes)
    name = (line.config_name or DEFAULTS[root]).removesuffix(".yaml")
    try:
        config, overrides = _composed(root, line, name, overrides, reading)
        algorithms = [override for override in overrides if _names_algorithm(root, override)]
        for override in overrides:
            if override not in algorithms:
                _apply(root, config, override, reading)
        reading.typed |= reading.set_keys
        written, defaults = flatten(OmegaConf.to_container(config)), flatten(default_tree(root))
        reading.set_keys |= {key for key, value in written.items() if value != defaults.get(key)}
        if missing := [f"{key}: has no value yet (???)" for key, value in written.items() if value == "???"]:
            raise UserError("\n".join(missing))
        reading.set_keys = {key for key in reading.set_keys if exists(root, key)}
        known, unknown = _plain_values(root, config)
        for key, value in unknown.items():
            _translate(root, config, key, value, reading)
        written = flatten(OmegaConf.to_container(config))
        for preset in reading.presets:
            reading.presets[preset] = [key for key, value in PRESETS[preset][1].items() if written.get(key) == value]
        for override in algorithms:
            _apply_algorithm(root, config, str(override.value()), reading)
        known = _plain_values(root, config)[0] if unknown or algorithms else known
        reading.tree = _within_limits(root, nested(known), reading)
    except (UserError, YAMLError, UnicodeDecodeError, OmegaConfBaseException, HydraException) as error:
        raise UserError("\n".join([*reading.mistakes, _one_line(error, line, name, root)])) from error
    return reading


def _composed(
    root: type[BaseModel], line: SimpleNamespace, name: str, overrides: Sequence[Override], reading: Reading
) -> tuple[DictConfig, list[Override]]:
    """The configuration `name` with the groups that overrides choose (`+task=sums`), and the other overrides."""
    folder = Path(line.config_path).expanduser().resolve() if line.config_path is not None else None
    if folder is not None and not folder.is_dir():
        # By "config" verl's scripts mean verl's own folder.
        if folder != Path("config").resolve() or name not in config_nodes(root):
            raise UserError(f"--config-path {line.config_path}: there is no such folder")
        folder = None
        reading.notes.append(f"--config-path {line.config_path}: there is no such folder; {name} is the built-in one")
    # Hydra copies its whole store to say whether a key is a group, and several times to compose.
    firsts = {override.key_or_group.partition("/")[0] for override in overrides if "." not in override.key_or_group}
    groups = firsts if folder is not None else firsts & ConfigStore.instance().repo.keys()
    may_be_groups = [
        override for override in overrides if override.package or override.key_or_group.partition("/")[0] in groups
    ]
    if folder is None and not may_be_groups:
        config, groups, notes, presets = pickle.loads(_built_in(root, name))
    else:
        config, groups, notes, presets = _compose(root, folder, name, may_be_groups)
    reading.notes += notes
    reading.presets = {preset: [] for preset in presets}
    return config, [override for override in overrides if override not in groups]


Composed = tuple[DictConfig, list[Override], list[str], list[str]]  # its groups, notes, presets


@cache
def _built_in(root: type[BaseModel], name: str) -> bytes:
    """Pickled, of which a copy is made in a seventh of the time."""
    return pickle.dumps(_compose(root, None, name, []))


def _compose(root: type[BaseModel], folder: Path | None, name: str, may_be_groups: Sequence[Override]) -> Composed:
    store = ConfigStore.instance()
    for built_in, node in config_nodes(root).items():
        store.repo.pop(f"{built_in}.yaml", None)
        if folder is None or not (folder / f"{built_in}.yaml").is_file():  # a file of that name takes its place
            store.store(name=built_in, node=node)
    with initialize_config_dir(str(folder), version_base="1.3") if folder else initialize(None, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        groups = [
            override
            for override in may_be_groups
            if override.package is not None or loader.get_group_options(override.key_or_group)
        ]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = compose(config_name=name, overrides=[group.input_line or "" for group in groups])
        chosen = loader.compute_defaults_list(name, [], RunMode.RUN).defaults
    used = [node.config_path for node in chosen if f"{node.config_path}.yaml" in store.repo]
    OmegaConf.set_struct(config, False)
    notes = [_first_line(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    return config, groups, notes, [u for u in used if u in PRESETS]


def _apply(root: type[BaseModel], config: DictConfig, override: Override, reading: Reading) -> None:
    """Set or reset one key, whether the schema has it or not."""
    key, text, value, mistakes = override.key_or_group, override.input_line, override.value(), reading.mistakes
    leaf = next((plain.name for plain in plain_keys(root) if key.startswith(f"{plain.name}.")), None)
    if below(key, "hydra"):
        reading.notes.append(f"{key} has no effect: Valor composes with Hydra but writes nothing through it")
    elif override.is_delete() and value is not None:
        mistakes.append(f"cannot read '{text}': write ~{key} alone")
    elif override.is_delete() and not (
        exists(root, key) and (leaf is None or OmegaConf.select(config, key) is not None)
    ):
        mistakes.append(unknown_key(root, key))
    elif override.is_delete():  # of an open dict it takes the entry away, elsewhere it restores the default
        names = [plain.name for plain in plain_keys(root) if below(plain.name, key)]
        for name in names:
            OmegaConf.update(config, name, get_at(default_tree(root), name), merge=False)
            reading.set_keys -= {at for at in reading.set_keys if below(at, name)}
        if not names:
            parent, _, last = key.rpartition(".")
            OmegaConf.select(config, parent).pop(last)
    elif override.is_sweep_override():
        mistakes.append(f"{key} has several values: write a [list] or a 'quoted text'; {SWEEPS}")
    elif is_section(root, key) and not isinstance(value, dict):
        if find_spelling(root, key, value) is None:
            mistakes.append(not_a_section(key, value))
        else:
            _translate(root, config, key, value, reading)
    elif leaf is not None and not is_open(root, key):
        mistakes.append(f"unknown key '{key}': '{leaf}' is a value, it has no keys of its own")
    else:
        if key in schema(root) and takes_texts(schema(root)[key].info.annotation):
            value = _as_typed(value, (text or "").partition("=")[2].strip())
        OmegaConf.update(config, key, value, force_add=True)
        reading.set_keys |= flatten(value, f"{key}.").keys()


def _as_typed(value: Any, text: str) -> Any:
    """A name such as 0.10, 1_000 or 8e12345, by itself or in a list, stays as it was typed."""
    if isinstance(value, list):
        items = [item.strip() for item in text[1:-1].split(",")]
        return [*map(_as_typed, value, items)] if len(items) == len(value) else value
    return text if isinstance(value, int | float) and not isinstance(value, bool) else value


def _names_algorithm(root: type[BaseModel], override: Override) -> bool:
    """Whether it is `algorithm=NAME`, or the estimator by a name that only ALGORITHMS has."""
    name = override.value()
    if not isinstance(name, str):
        return False
    if override.key_or_group == "algorithm":
        return is_section(root, "algorithm")
    return override.key_or_group == ESTIMATOR and name in ALGORITHMS and ALGORITHMS[name][ESTIMATOR] != name


def _apply_algorithm(root: type[BaseModel], config: DictConfig, name: str, reading: Reading) -> None:
    """Set the estimator, and those keys of the algorithm that nobody has set."""
    settings = ALGORITHMS.get(name, {ESTIMATOR: name})
    present = OmegaConf.select(config, ESTIMATOR)
    if ESTIMATOR in reading.set_keys and present != settings[ESTIMATOR]:
        reading.mistakes.append(f"algorithm={name} and {ESTIMATOR}={present} are different: give one of them")
        return
    more = {key: value for key, value in settings.items() if key == ESTIMATOR or key not in reading.set_keys}
    for key, value in more.items():
        OmegaConf.update(config, key, value)
        reading.set_keys.add(key)
    if more != {ESTIMATOR: name}:
        reading.notes.append(f"algorithm={name} is {' '.join(f'{key}={show(value)}' for key, value in more.items())}")


def _within_limits(root: type[BaseModel], tree: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """The tree with keys that are null, or whose default is too much, at the value of the key that is their limit."""
    by_preset, flat = {key for keys in reading.presets.values() for key in keys}, flatten(tree)
    for key in plain_keys(root):
        if limit := key.declared("within"):
            value, most = lookup(root, tree, key.name), lookup(root, tree, limit)
            is_null = key.name in flat and flat[key.name] is None and not key.declared("inherits")
            unset = key.name not in reading.set_keys or key.name in by_preset
            if is_null or (unset and isinstance(value, int) and isinstance(most, int) and value > most):
                set_at(tree, key.name, most)
    return tree


def _one_line(error: Exception, line: SimpleNamespace, name: str, root: type[BaseModel]) -> str:
    file = f"{line.config_path or '.'}/{name}.yaml"
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, YAMLError | UnicodeDecodeError):
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        return f"{file}{where}: not valid yaml ({getattr(error, 'problem', None) or error})"
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key + ': ' if error.full_key else ''}{_first_line(error)}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file == name:
        text = f"there is no configuration '{name}': built in are {', '.join(config_nodes(root))}"
        if line.config_path is None:
            return f"{text}; for a yaml file of your own add --config-path DIR"
        there = sorted(path.stem for path in Path(line.config_path).expanduser().glob("*.yaml"))
        return f"{text}; {line.config_path} has {', '.join(there) or 'no yaml file'}"
    if "must be a DictConfig" in str(error):
        return f"{file}: must hold keys, such as trainer: {{seed: 1}}"
    return f"{file}: {_first_line(error)}"


def _first_line(error: Exception | Warning | str) -> str:
    return next((text.strip() for text in str(error).splitlines() if text.strip()), "")


def _plain_values(root: type[BaseModel], config: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each key of the schema with its value, and each other one."""
    known, unknown = dict[str, Any](), dict[str, Any]()

    def walk(tree: dict[str, Any], prefix: str = "") -> None:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            section = is_section(root, key)
            if section and isinstance(value, dict):
                walk(value, f"{key}.")
            elif exists(root, key) and not (section and find_spelling(root, key, value)):
                theirs = _entries_of_verl(root, key, value)
                known[key] = nested({k: v for k, v in flatten(value).items() if k not in theirs}) if theirs else value
                unknown.update({f"{key}.{entry}": setting for entry, setting in theirs.items()})
            else:
                unknown.update(flatten(value, f"{key}."))

    walk(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]
    return known, unknown


def _entries_of_verl(root: type[BaseModel], key: str, value: Any) -> dict[str, Any]:
    """Of the keys inside an open dict of sections those that verl alone has."""
    kind = get_args(fields(root)[key].info.annotation)[1:] if key in fields(root) else ()
    if not isinstance(value, dict) or not kind or not isinstance(kind[0], type) or not issubclass(kind[0], BaseModel):
        return {}
    flat = flatten(value).items()
    return {entry: setting for entry, setting in flat if find_spelling(root, f"{key}.{entry}", setting)}


def _translate(root: type[BaseModel], config: DictConfig, key: str, value: Any, reading: Reading) -> None:
    """What an unknown key of the tree does: it sets another one, has no effect, or is a mistake."""
    rule = find_spelling(root, key, value)
    if rule is None:
        reading.mistakes.append(unknown_key(root, key))
        return
    spelling, target = rule
    if value is None:
        return
    if target is None and not (spelling.refused or spelling.answered):
        reading.notes.append(f"{key} has no effect: {spelling.reason}")
    elif spelling.refused and (spelling.only or value not in (False, {})):
        reading.mistakes.append(f"{key}={show(value)} asks for what Valor does not have: {spelling.reason}")
    elif spelling.answered:
        reading.mistakes.append(f"{key}={show(value)}: {spelling.reason}")
    elif target is not None:
        present, said = OmegaConf.select(config, target), f"{key} is read as {target}"
        if spelling.value is not None:
            said, value = f"{key}={show(value)} is {target}={spelling.value}", yaml.safe_load(spelling.value)
        if target in reading.typed and key not in reading.typed:
            return  # a file's, and the override counts
        if target in reading.set_keys and present != value and (target in reading.typed) == (key in reading.typed):
            both = f"{key}={show(value)} and {target}={show(present)} are the same setting"
            reading.mistakes.append(f"{both}: give one of them")
            return
        OmegaConf.update(config, target, value, force_add=True)
        reading.set_keys.add(target)
        reading.notes.append(f"{said}{spelling.why}")
