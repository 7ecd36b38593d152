"""The runs that a sweep consists of: each arm with each seed, its command, its folder, and what it needs."""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from valor.config import load
from valor.config.describe import show
from valor.config.tree import flatten, follows
from valor.errors import UserError
from valor.lab.sweep_file import ENTRIES, Arm, SweepConfig, expand, texts
from valor.tracking.rundir import write_atomically
from valor.trainer.checks import check

RESULT_FILE = "result.json"
_REFERENCE = re.compile(r"<run:([^<>]*)>")
# A run is the same run in another place and under another name.
_NAMES = (
    *(f"trainer.{name}" for name in ("default_local_dir", "experiment_name", "project_name")),
    "actor_rollout_ref.rollout.server.log_dir",
)


@dataclass(frozen=True)
class Run:
    """One arm with one seed. `settings`: the arm's resolved configuration by dotted key, without names and folders."""

    arm: str
    seed: int
    folder: Path
    command: tuple[str, ...]
    after: tuple[str, ...]
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.arm} seed {self.seed}"

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
    """A sweep whose every run has been checked. `differing`: the keys in which its arms differ."""

    config: SweepConfig
    arms: tuple[Arm, ...]
    runs: tuple[Run, ...]
    differing: tuple[str, ...]

    @property
    def out(self) -> Path:
        return Path(self.config.out)

    @property
    def metric(self) -> str:
        return self.config.metric or ENTRIES[self.config.entry].metric

    @property
    def control(self) -> str:
        return self.config.control or self.arms[0].name

    def of(self, arm: str) -> list[Run]:
        return sorted((run for run in self.runs if run.arm == arm), key=lambda run: run.seed)


def plan_sweep(config: SweepConfig) -> Sweep:
    """Every run of a sweep, seed by seed. UserError: all mistakes of all arms at once."""
    arms = expand(config)
    _check_references(arms)
    settings: dict[str, dict[str, Any]] = {}
    mistaken: dict[str, list[str]] = {}
    for arm in arms:
        try:
            settings[arm.name] = _settings(config, arm)
        except UserError as error:
            for line in str(error).splitlines():
                mistaken.setdefault(line, []).append(arm.name)
    if mistaken:
        places = {line: f"arm {', '.join(names)}: " for line, names in mistaken.items() if len(names) < len(arms)}
        raise UserError("\n".join(places.get(line, "every arm: ") + line for line in mistaken))

    def run(arm: Arm, seed: int) -> Run:
        command = (sys.executable, "-m", "valor", *config.entry.split(), *_arguments(config, arm, seed))
        folder = Path(config.out, arm.name, f"seed_{seed}")
        return Run(arm.name, seed, folder, command, _needed(arm), settings[arm.name])

    runs = [run(arm, seed) for seed in config.seeds for arm in arms]
    return Sweep(config, tuple(arms), tuple(runs), _differing(ENTRIES[config.entry].root, runs[: len(arms)]))


def _arguments(config: SweepConfig, arm: Arm, seed: int) -> list[str]:
    """The command line of a run, without the command."""

    def fill(text: str) -> str:
        return _REFERENCE.sub(lambda found: f"{config.out}/{found[1]}/seed_{seed}", text.replace("<seed>", str(seed)))

    options = [("--config-path", config.config_path), ("--config-name", config.config_name)]
    return [
        *(word for option, value in options if value for word in (option, value)),
        *texts(config.base),
        *map(fill, arm.overrides),
        f"trainer.seed={seed}",
        f"trainer.experiment_name={config.name}-{arm.name}-seed_{seed}",
        f"trainer.default_local_dir={config.out}/{arm.name}/seed_{seed}",
        "trainer.resume_mode=auto",
    ]


def _settings(config: SweepConfig, arm: Arm) -> dict[str, Any]:
    """What an arm is: its resolved configuration, as for seed 0 in a folder OUT. UserError: its mistakes."""
    loaded = load(_arguments(config, arm, 0), ENTRIES[config.entry].root, check)
    settings = json.dumps(flatten(loaded.config.model_dump(mode="json")))
    settings = json.loads(settings.replace(json.dumps(f"{config.out}/")[:-1], '"OUT/'))
    return {key: value for key, value in settings.items() if key not in _NAMES}


def _needed(arm: Arm) -> tuple[str, ...]:
    """Arms whose runs this one's settings refer to."""
    return tuple(dict.fromkeys(_REFERENCE.findall(" ".join(arm.overrides))))


def _check_references(arms: Sequence[Arm]) -> None:
    """UserError: a <run:ARM> that is no arm, or a circle of them."""
    graph = {arm.name: set(_needed(arm)) for arm in arms}
    for name, needed in graph.items():
        if unknown := needed - graph.keys():
            raise UserError(f"arm {name}: <run:{min(unknown)}> is no arm: there are {', '.join(graph)}")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise UserError(f"arms need each other in a circle: {' -> '.join(error.args[1])}") from None


def _differing(root: type[BaseModel], runs: Sequence[Run]) -> tuple[str, ...]:
    """Keys whose values are not the same in all of these runs, without those that only follow another key."""
    settings = [run.settings for run in runs]
    keys = {key: None for one in settings for key in one if len({show(other.get(key)) for other in settings}) > 1}
    return tuple(key for key in keys if not follows(root, key, settings))
