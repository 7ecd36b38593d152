"""From what was typed, or a resolved yaml file, to a validated configuration, or to all mistakes, one line each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from omegaconf import OmegaConf
from pydantic import ValidationError

from valor.config.base import Section
from valor.config.command_line import CommandLine, expand_sweep, make_job, parse_overrides, read_arguments
from valor.config.composition import Reading, compose_tree, translate
from valor.config.describe import describe_errors
from valor.config.ppo import PPOConfig
from valor.config.rules import contradictions, unavailable_lines, unavailable_settings
from valor.errors import UserError

Root = TypeVar("Root", bound=Section)
Check = Callable[[Root], list[str]]


@dataclass(frozen=True)
class LoadedConfig(Generic[Root]):
    """A validated tree and how it came about.

    explicit_keys: keys set by an override, or by a yaml file to something other than the default.
    notes: what to tell the user once (aliases that were read, settings without effect).
    unavailable: what the run would stop at; empty unless `dry_run`, as otherwise `load` raises it.
    label: what distinguishes a job of a multirun; None for a single run.
    """

    config: Root
    explicit_keys: frozenset[str] = frozenset()
    dry_run: bool = False
    notes: tuple[str, ...] = ()
    unavailable: tuple[str, ...] = ()
    label: str | None = None


def load(argv: Sequence[str], root: type[Root] = PPOConfig, check: Check[Root] | None = None) -> LoadedConfig[Root]:
    """The configuration of one run. UserError: every mistake in the command line, one line each."""
    runs = load_runs(argv, root, check)
    if len(runs) != 1:
        raise UserError(f"the command line describes {len(runs)} runs, one is expected here: leave out -m")
    return runs[0]


def load_runs(
    argv: Sequence[str], root: type[Root] = PPOConfig, check: Check[Root] | None = None
) -> list[LoadedConfig[Root]]:
    """The configuration of a run, or of every job of a multirun, all validated before the first one starts.

    `check` is asked for the mistakes that a valid tree still has in the eyes of those who act on it, a line each.
    Jobs of a multirun get names and folders of their own: their swept settings are appended to
    trainer.experiment_name (and to a trainer.default_local_dir that was given). UserError as in `load`.
    """
    line = read_arguments(argv)
    overrides, mistakes = parse_overrides(line.overrides)
    readings = [Reading(overrides, mistakes=mistakes)]
    if line.multirun:
        keys = [override.key_or_group for override in overrides if override.is_sweep_override()]
        jobs = [(parse_overrides(texts)[0], make_job(texts, keys)) for texts in expand_sweep(overrides)]
        readings = [Reading(own, job, mistakes=[*mistakes]) for own, job in jobs]
    loaded: list[LoadedConfig[Root]] = []
    lines: list[str] = []
    for reading in readings:
        try:
            loaded.append(_load(root, check, line, reading))
        except UserError as error:
            lines += str(error).splitlines()
    if lines:
        raise UserError("\n".join(dict.fromkeys(lines)))
    return loaded


def _load(root: type[Root], check: Check[Root] | None, line: CommandLine, reading: Reading) -> LoadedConfig[Root]:
    compose_tree(root, line, reading)
    translate(root, reading)
    try:
        config = root.model_validate(reading.tree)
    except ValidationError as error:
        raise UserError("\n".join([*reading.mistakes, *describe_errors(root, error, reading.set_keys)])) from error
    asked = unavailable_settings(config)
    for feature, settings in reading.unavailable.items():
        asked[feature] = [*asked.get(feature, []), *settings]
    unavailable = unavailable_lines(asked)
    mistakes = [*reading.mistakes, *contradictions(config)]
    mistakes += check(config) if check is not None and not unavailable else []
    if mistakes or (unavailable and not line.dry_run):
        raise UserError("\n".join(mistakes or unavailable))
    notes, label = tuple(dict.fromkeys(reading.notes)), reading.job.label if reading.job else None
    return LoadedConfig(config, frozenset(reading.set_keys), line.dry_run, notes, tuple(unavailable), label)


def dump_yaml(config: Section) -> str:
    """Every key with its value; `load_yaml`, and --config-path/--config-name, read it back to an equal tree."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(config.model_dump(mode="json"))))


def load_yaml(path: Path, root: type[Root] = PPOConfig) -> Root:
    """The tree that `dump_yaml` wrote. UserError: no such file, or not such a tree."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        raise UserError("\n".join(f"{path}: {line}" for line in describe_errors(root, error, ()))) from error


def _escaped(value: Any) -> Any:
    """Text with `${` in it protected, so that it is not taken for an interpolation."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
