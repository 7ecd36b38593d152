"""What a sweep is: arms, seeds and an entry point, as YAML or code says it; and its runs, each arm with each seed."""

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from valor.config.base import PathStr, Section, inherits
from valor.config.command_line import literal
from valor.config.command_line import overrides as written
from valor.config.describe import describe_errors, show
from valor.config.inheritance import follows
from valor.config.presets import COMMANDS
from valor.config.tree import flatten
from valor.controller.jobs import Job
from valor.errors import UserError
from valor.tracking.rundir import read_yaml, write_atomically
from valor.trainer.command import load_checked
from valor.trainer.missing import missing

HEADLINE = "validation score"
METRICS = {
    "ppo": HEADLINE,
    "sft": "val/loss",
    "rm train": "val/accuracy",
    "critic pretrain": "critic/holdout/auc",
}
"""The commands that a sweep may run, each with the metric by which its runs are compared."""
RESERVED = tuple(
    f"trainer.{name}" for name in ("seed", "experiment_name", "default_local_dir", "resume_mode", "resume_from_path")
)
"""Keys that the sweep itself sets: they name a run, and let it go on after an interruption."""
RESULT_FILE = "result.json"
# A run is the same run in another place and under another name.
_NAMES = [f"trainer.{name}" for name in ("default_local_dir", "experiment_name", "project_name")]
_NAMES.append("actor_rollout_ref.rollout.server.log_dir")
_REFERENCE = re.compile(r"<run:([^<>]*)>")
_NAME = re.compile(r"[\w.=+-]+")
Overrides = dict[str, Any] | list[str]


class SweepConfig(Section):
    """One sweep. Settings are a mapping, of dotted keys or nested, or a list of key=value texts as typed in a shell."""

    name: str
    """First part of every run's name."""
    entry: str = "ppo"
    """The command that every run calls."""
    config_name: str | None = None
    """Its --config-name."""
    config_path: PathStr | None = None
    """Its --config-path."""
    base: Overrides = Field(default_factory=dict)
    """Settings of every run. In their values, as in those of arms, <seed> and <run:ARM> are filled in."""
    arms: dict[str, Overrides | None] = Field(default_factory=dict)
    """Arms by name, each with its own settings."""
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    """Keys with lists of values: every combination of them, for each arm."""
    seeds: list[NonNegativeInt] = Field(default=[0, 1, 2], min_length=1)
    """Each arm runs once with each."""
    control: str | None = None
    """The arm that the others are compared with; null takes the first."""
    metric: str | None = None
    """What is compared, as last measured; null takes the entry's own, for ppo the mean of all val-core mean@n."""
    parallel: PositiveInt = 1
    """Runs at a time: 1 one after another on this machine, more side by side, each with its share of the GPUs."""
    out: PathStr = inherits("runs/sweeps/${.name}")
    """Folder of the sweep."""


def read_sweep(path: Path, **options: Any) -> SweepConfig:
    """The sweep in a YAML file, `options` (those that are not None) in place of its keys.

    UserError: no such file, not YAML, unknown keys (with the nearest), values of the wrong kind.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; docs/lab.md shows how to write one")
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must hold keys such as arms, seeds, base")
    tree = {"name": path.stem} | tree | {key: value for key, value in options.items() if value is not None}
    try:
        return SweepConfig.model_validate(tree)
    except ValidationError as error:
        wrong = describe_errors(SweepConfig, error, tree.keys()).values()
        lines = [line.replace("`valor config keys`", "docs/lab.md") for line in wrong]
        raise UserError("\n".join(f"{path}: {line}" for line in lines)) from None


def texts(overrides: Overrides | None) -> list[str]:
    """Settings as a command line writes them."""
    if isinstance(overrides, list):
        return overrides
    return [_text(key, value) for key, value in flatten(overrides or {}).items()]


def _text(key: str, value: Any) -> str:
    """Text goes as it is, other values as Hydra's grammar has them."""
    return f"{key}={value if isinstance(value, str) else literal(value)}"


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def expand(sweep: SweepConfig) -> dict[str, list[str]]:
    """What each arm sets besides the sweep's base, by name: named arms crossed with the grid.

    UserError: what makes them no comparison, all mistakes at once.
    """
    wrong = "arms: '{}' is no name for a folder: use letters, digits and _.=+-"
    mistakes = [wrong.format(name) for name in sweep.arms if not _NAME.fullmatch(name)]
    if sweep.entry not in METRICS:
        mistakes.append(f"entry: '{sweep.entry}' is no command to sweep: there are {', '.join(METRICS)}")
    if len(set(sweep.seeds)) < len(sweep.seeds):
        mistakes.append(f"seeds: {sweep.seeds} names a seed twice")
    points = product(*([_text(key, value) for value in values] for key, values in sweep.grid.items()))
    arms: dict[str, list[str]] = {}
    for (name, overrides), point in product((sweep.arms or {"": None}).items(), points):
        full = "-".join(part for part in (name, _label(point)) if part)
        if full in arms:
            mistakes.append(f"arms: two have the same name, '{full}'")
        arms[full] = [*texts(overrides), *point]
    if not any(arms):
        mistakes.append("arms: there is nothing to compare: name arms, or give a grid of settings")
    if sweep.control is not None and sweep.control not in arms:
        mistakes.append(f"control: there is no arm '{sweep.control}': there are {', '.join(arms)}")
    mistakes += _reserved("base", texts(sweep.base), RESERVED)
    for name, overrides in arms.items():
        mistakes += _reserved(f"arm {name}", overrides, (*RESERVED, "data.seed"))
    if mistakes := [*mistakes, *_wrong_references({name: _all(sweep, arms[name]) for name in arms})]:
        raise UserError("\n".join(mistakes))
    return arms


def _label(point: Sequence[str]) -> str:
    """Settings as a part of a folder name: `lam=0.9-lr=1e-06`, with full keys where short ones collide."""
    values = {key_of(text): text.partition("=")[2] for text in point}
    short = {key.rpartition(".")[2]: value for key, value in values.items()}
    label = "-".join(f"{key}={value}" for key, value in (short if len(short) == len(values) else values).items())
    return re.sub(r"[^\w.=+-]+", "_", label).strip("_")


def _reserved(where: str, overrides: list[str], keys: tuple[str, ...]) -> list[str]:
    return [
        f"{where}: {key} is set by the sweep: "
        + ("arms of a seed get the same prompts" if key == "data.seed" else "list seeds, and name arms and out")
        for key in map(key_of, overrides)
        if key in keys
    ]


@dataclass(frozen=True, eq=False)
class Run(Job):
    """One arm with one seed. `settings`: the arm's resolved configuration by dotted key, without names and folders."""

    arm: str = ""
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """What result.json says; {} before the first start."""
        path = self.folder / RESULT_FILE
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def write(self, status: str) -> None:
        """`status`: running or finished."""
        record = {"status": status, "arm": self.arm, "seed": self.seed, "command": shlex.join(self.command)}
        write_atomically(self.folder / RESULT_FILE, json.dumps(record | {"settings": self.settings}, indent=1) + "\n")

    @property
    def finished(self) -> bool:
        return self.record().get("status") == "finished"


@dataclass(frozen=True)
class Sweep:
    """A sweep whose every run has been checked. `differing`: the keys in which its arms differ. `missing`: a line for
    each file and model that its runs need, and that is not there."""

    config: SweepConfig
    arms: tuple[str, ...]
    runs: tuple[Run, ...]
    differing: tuple[str, ...]
    missing: tuple[str, ...] = ()

    @property
    def out(self) -> Path:
        return Path(self.config.out)

    @property
    def metric(self) -> str:
        return self.config.metric or METRICS[self.config.entry]

    @property
    def control(self) -> str:
        return self.config.control or self.arms[0]

    def of(self, arm: str) -> list[Run]:
        return sorted((run for run in self.runs if run.arm == arm), key=lambda run: run.seed)


def plan_sweep(config: SweepConfig) -> Sweep:
    """Every run of a sweep, seed by seed. UserError: all mistakes of all arms at once."""
    arms, settings, mistaken = expand(config), dict[str, dict[str, Any]](), dict[str, list[str]]()
    lines = list[str]()
    for name, overrides in arms.items():
        try:
            arm: Any = load_checked(_arguments(config, name, overrides, 0), COMMANDS[config.entry]).config
            settings[name] = _settings(config, arm)
            if config.entry != "demo" and not _needed(_all(config, overrides)):  # these read what is yet to be written
                lines += missing(arm)
        except UserError as error:
            for line in str(error).splitlines():
                mistaken.setdefault(line, []).append(name)
    if mistaken:
        wrong = {line: f"arm {', '.join(names)}" for line, names in mistaken.items() if len(names) < len(arms)}
        raise UserError("\n".join(f"{wrong.get(line, 'every arm')}: {line}" for line in mistaken))

    def run(seed: int, name: str, overrides: list[str]) -> Run:
        command = (sys.executable, "-m", "valor", *config.entry.split(), *_arguments(config, name, overrides, seed))
        folder, needed = Path(config.out, name, f"seed_{seed}"), _needed(_all(config, overrides))
        after = frozenset(f"{arm} seed {seed}" for arm in needed)
        return Run(f"{name} seed {seed}", command, folder, after, name, seed, settings[name])

    runs = [run(seed, *arm) for seed in config.seeds for arm in arms.items()]
    differing = _differing(config.entry, list(settings.values()))
    return Sweep(config, tuple(arms), tuple(runs), differing, tuple(dict.fromkeys(lines)))


def _arguments(config: SweepConfig, arm: str, overrides: list[str], seed: int) -> list[str]:
    """The command line of a run, without the command."""

    def fill(text: str) -> str:
        return _REFERENCE.sub(lambda match: f"{config.out}/{match[1]}/seed_{seed}", text.replace("<seed>", str(seed)))

    options = {"--config-path": config.config_path, "--config-name": config.config_name}
    names = {"trainer.experiment_name": f"{config.name}-{arm}-seed_{seed}"}
    names["trainer.default_local_dir"] = f"{config.out}/{arm}/seed_{seed}"
    return [
        *(word for option, value in options.items() if value for word in (option, value)),
        *map(fill, _all(config, overrides)),
        f"trainer.seed={seed}",
        *written(COMMANDS[config.entry], names),
        "trainer.resume_mode=auto",
    ]


def _settings(config: SweepConfig, arm: Any) -> dict[str, Any]:
    """What an arm is: its resolved configuration, as for seed 0 in a folder OUT."""
    settings = json.dumps(flatten(arm.model_dump(mode="json")))
    settings = json.loads(settings.replace(json.dumps(f"{config.out}/")[:-1], '"OUT/'))
    return {key: value for key, value in settings.items() if key not in _NAMES}


def _all(config: SweepConfig, overrides: Sequence[str]) -> list[str]:
    """The settings of an arm with the base's."""
    return [*texts(config.base), *overrides]


def _needed(overrides: Sequence[str]) -> set[str]:
    """Arms to whose runs these settings refer."""
    return {*_REFERENCE.findall(" ".join(overrides))}


def _wrong_references(arms: Mapping[str, list[str]]) -> list[str]:
    """A line for each <run:ARM> that is no arm, or one for a circle of them."""
    graph = {name: _needed(overrides) for name, overrides in arms.items()}
    if unknown := {name: needed - graph.keys() for name, needed in graph.items() if needed - graph.keys()}:
        there = f"there are {', '.join(graph)}"
        return [f"arm {name}: <run:{min(missing)}> is no arm: {there}" for name, missing in unknown.items()]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"arms need each other in a circle: {' -> '.join(error.args[1])}"]
    return []


def _differing(entry: str, settings: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Keys whose values are not the same in all arms, without those that only follow another key."""
    keys = {key: None for flat in settings for key in flat if len({show(other.get(key)) for other in settings}) > 1}
    return tuple(key for key in keys if not follows(COMMANDS[entry], key, settings))
