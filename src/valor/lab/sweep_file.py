"""What a sweep is: arms, seeds and an entry point, as a YAML file says it or as code builds it."""

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from valor.config import CriticPretrainConfig, PPOConfig, RMConfig, SFTConfig
from valor.config.base import PathStr, Section, inherits
from valor.config.command_line import literal
from valor.config.describe import describe_errors
from valor.config.tree import flatten
from valor.errors import UserError

HEADLINE = "validation score"


class Entry(NamedTuple):
    """A command that takes key=value: the tree that it reads, and the metric by which its runs are compared."""

    root: type[Section]
    metric: str


ENTRIES = {
    "ppo": Entry(PPOConfig, HEADLINE),
    "sft": Entry(SFTConfig, "val/loss"),
    "rm train": Entry(RMConfig, "val/accuracy"),
    "critic pretrain": Entry(CriticPretrainConfig, "critic/holdout/auc"),
}
# Keys that the sweep itself sets: they name a run, and let it go on after an interruption.
RESERVED = (
    "trainer.seed",
    "trainer.experiment_name",
    "trainer.default_local_dir",
    "trainer.resume_mode",
    "trainer.resume_from_path",
)
Overrides = dict[str, Any] | list[str]
_NAME = re.compile(r"[\w.=+-]+")


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
    """Settings of every run."""
    arms: dict[str, Overrides | None] = Field(default_factory=dict)
    """Arms by name, each with its own settings; <seed> and <run:ARM> in them are filled in."""
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


class Arm(NamedTuple):
    """One condition: what it sets besides the sweep's base."""

    name: str
    overrides: list[str]


def read_sweep(path: Path, **given: Any) -> SweepConfig:
    """The sweep in a YAML file, `given` (those that are not None) in place of its keys.

    UserError: no such file, not YAML, unknown keys (with the nearest), values of the wrong kind.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; docs/lab.md shows how to write one")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise UserError(
            f"{path}{f', line {mark.line + 1}' if mark else ''}: not valid yaml ({getattr(error, 'problem', error)})"
        ) from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must hold keys such as arms, seeds, base")
    tree = {"name": path.stem} | tree | {key: value for key, value in given.items() if value is not None}
    try:
        return SweepConfig.model_validate(tree)
    except ValidationError as error:
        lines = describe_errors(SweepConfig, error, tree.keys())
        lines = [line.replace("`valor config keys`", "docs/lab.md") for line in lines]
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


def expand(sweep: SweepConfig) -> list[Arm]:
    """The arms, named ones crossed with the grid. UserError: what makes them no comparison, all mistakes at once."""
    wrong = "arms: '{}' is no name for a folder: use letters, digits and _.=+-"
    mistakes = [wrong.format(name) for name in sweep.arms if not _NAME.fullmatch(name)]
    if sweep.entry not in ENTRIES:
        mistakes.append(f"entry: '{sweep.entry}' is no command to sweep: there are {', '.join(ENTRIES)}")
    if len(set(sweep.seeds)) < len(sweep.seeds):
        mistakes.append(f"seeds: {sweep.seeds} names a seed twice")
    points = list(product(*([_text(key, value) for value in values] for key, values in sweep.grid.items())))
    arms = []
    for name, own in (sweep.arms or {"": None}).items():
        for point in points:
            full = "-".join(part for part in (name, _label(point)) if part)
            arms.append(Arm(full, [*texts(own), *point]))
    names = [arm.name for arm in arms]
    if not any(names):
        mistakes.append("arms: there is nothing to compare: name arms, or give a grid of settings")
    elif len(set(names)) < len(names):
        mistakes.append(f"arms: two have the same name, '{next(n for n in names if names.count(n) > 1)}'")
    if sweep.control is not None and sweep.control not in names:
        mistakes.append(f"control: there is no arm '{sweep.control}': there are {', '.join(names)}")
    mistakes += _reserved("base", texts(sweep.base), RESERVED)
    for arm in arms:
        mistakes += _reserved(f"arm {arm.name}", arm.overrides, (*RESERVED, "data.seed"))
    if mistakes:
        raise UserError("\n".join(mistakes))
    return arms


def _label(point: Sequence[str]) -> str:
    """Settings as a part of a folder name: `lam=0.9-lr=1e-06`, with full keys where short ones collide."""
    values = {key_of(text): text.partition("=")[2] for text in point}
    short = {key.rpartition(".")[2]: value for key, value in values.items()}
    label = "-".join(f"{key}={value}" for key, value in (short if len(short) == len(values) else values).items())
    return re.sub(r"[^\w.=+-]+", "_", label).strip("_")


def _reserved(place: str, overrides: list[str], keys: tuple[str, ...]) -> list[str]:
    return [
        f"{place}: {key_of(one)} is set by the sweep: "
        + ("arms of a seed get the same prompts" if key_of(one) == "data.seed" else "list seeds, and name arms and out")
        for one in overrides
        if key_of(one) in keys
    ]
