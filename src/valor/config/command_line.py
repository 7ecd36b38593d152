"""What is typed: options, and Hydra overrides one by one, so that every mistake is found and not just the first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from valor.errors import UserError

USAGE = """\
usage: valor ppo|sft|rm train [options] key=value ...

  key=value, +key=value, ++key=value   set a key: numbers, true/false, null, text, [lists], {dicts}
  ~key                                 back to the default
  --config-name NAME                   start from a named configuration or NAME.yaml
  --config-path DIR, --config-dir DIR  where that yaml file is
  -m, --multirun                       run every combination of key=1,2,3 one after another
  --dry-run                            resolve, check, print the plan of the run, and stop

valor config keys [PREFIX] lists the keys."""

_VALUED = {
    "--config-name": "config_name",
    "-cn": "config_name",
    "--config-path": "config_path",
    "-cp": "config_path",
    "--config-dir": "config_path",
    "-cd": "config_path",
}
_FLAGS = {"--multirun": "multirun", "-m": "multirun", "--dry-run": "dry_run"}
_STRUCTURED = re.compile(r"[\[\]{}(),'\"\\]")


@dataclass(frozen=True)
class CommandLine:
    """Options, and the override arguments in the order typed."""

    overrides: tuple[str, ...] = ()
    config_name: str | None = None
    config_path: str | None = None
    multirun: bool = False
    dry_run: bool = False


def read_arguments(argv: Sequence[str]) -> CommandLine:
    """Split a command line; --help prints USAGE and exits.

    UserError: unknown options, options without their value (all of them at once).
    """
    if "--help" in argv or "-h" in argv:
        print(USAGE)
        raise SystemExit(0)
    line, overrides, mistakes = CommandLine(), [], []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            overrides.append(word)
        elif word in _FLAGS:
            line = replace(line, **{_FLAGS[word]: True})
        elif name in _VALUED:
            value = value if equals else next(words, "")
            if not value:
                mistakes.append(f"{name} needs a value")
            line = replace(line, **{_VALUED[name]: value})
        else:
            mistakes.append(f"unknown option '{name}': there are {', '.join([*_VALUED, *_FLAGS])}")
    if mistakes:
        raise UserError("\n".join(mistakes))
    return replace(line, overrides=tuple(overrides))


# "low_high" of a threshold; as a number, 0.5_5 would be 0.55.
_TWO_BOUNDS = re.compile(r"[\d.eE+-]+_[\d.eE+-]+")


def parse_overrides(texts: Sequence[str]) -> tuple[list[Override], list[str]]:
    """The overrides that can be read, and one line for each that cannot."""
    parser = OverridesParser.create()
    parsed, mistakes = [], []
    for text in texts:
        try:
            override = _parse(parser, text)
        except HydraException:
            mistakes.append(f"cannot read '{text}': {_advice(text)}")
            continue
        if override.key_or_group:
            parsed.append(override)
        else:
            mistakes.append(f"cannot read '{text}': {_advice(text)}")
    return parsed, mistakes


def _parse(parser: OverridesParser, text: str) -> Override:
    key, equals, value = text.partition("=")
    if key.endswith("_threshold") and _TWO_BOUNDS.fullmatch(value):
        return parser.parse_override(f"{key}='{value}'")
    try:
        return parser.parse_override(text)
    except HydraException:
        if not equals or not value or _STRUCTURED.search(value):
            raise
        # A value outside Hydra's grammar without any list, dict or quote in it (a ~ path, a URL) is plain text.
        return parser.parse_override(f"{key}='{value}'")


def _advice(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals:
        return "write key=value"
    if not re.fullmatch(r"[+~]*[A-Za-z_][\w./@:-]*", key):
        return "the part before = must be a dotted key"
    for opening, closing in ("[]", "{}", "()"):
        if value.count(opening) != value.count(closing):
            return f"'{opening}' and '{closing}' do not match"
    return f"quote the value, for the shell and for the parser: \"{key}='...'\""


def expand_sweep(overrides: Sequence[Override]) -> list[list[str]]:
    """Every combination of a multirun, in Hydra's order (the last key turns fastest).

    UserError: an interval, which has no list of values.
    """
    deletions = [override.input_line or "" for override in overrides if override.is_delete()]
    try:
        [jobs] = BasicSweeper.split_arguments([o for o in overrides if not o.is_delete()], None)
    except HydraException as error:
        raise UserError("a multirun takes values: key=1,2,3, range(1,4), choice(a,b) or glob(*)") from error
    return [[*job, *deletions] for job in jobs]


def sweep_keys(overrides: Sequence[Override]) -> list[str]:
    """The keys that a multirun varies."""
    return [override.key_or_group for override in overrides if override.is_sweep_override()]


@dataclass(frozen=True)
class Job:
    """One job of a multirun: the keys that vary, and what tells it from the others."""

    label: str
    swept: tuple[str, ...]


def make_job(texts: Sequence[str], keys: Sequence[str]) -> Job | None:
    """The job of these overrides, None when nothing varies.

    Its label is fit for a folder name: `lam=0.9-lr=1e-06`, with full keys where short ones collide.
    """
    if not keys:
        return None
    values = {name: value for name, _, value in (text.lstrip("+").partition("=") for text in texts)}
    last = [key.rpartition(".")[2] for key in keys]
    unique = len(set(last)) == len(last)
    parts = (f"{short if unique else key}={values[key]}" for key, short in zip(keys, last, strict=True))
    return Job(re.sub(r"[^\w.=+-]+", "_", "-".join(parts)).strip("_"), tuple(keys))


def literal(value: Any) -> str:
    """A value as an override writes it."""
    if isinstance(value, str):
        if value.startswith("${"):
            return value
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, list):
        return f"[{','.join(literal(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{literal(item)}" for key, item in value.items()) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
