"""What is typed: options, and Hydra overrides one by one, so that every mistake is found and not just the first."""

import argparse
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

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

_OPTIONS = "--config-name (-cn), --config-path (-cp), --multirun (-m), --dry-run, --help"
_STRUCTURED = re.compile(r"[\[\]{}(),'\"\\]")
# "low_high" of a threshold; as a number, 0.5_5 would be 0.55.
_TWO_BOUNDS = re.compile(r"[\d.eE+-]+_[\d.eE+-]+")


class CommandLine(argparse.Namespace):
    """Options, and the override arguments in the order typed."""

    overrides: list[str]
    config_name: str | None
    config_path: str | None
    multirun: bool
    dry_run: bool


def read_arguments(argv: Sequence[str]) -> CommandLine:
    """Split a command line; --help prints USAGE and exits. UserError: unknown options, options without their value."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-path", "--config-dir", "-cp", "-cd")
    for flags in (("--multirun", "-m"), ("--dry-run",), ("--help", "-h")):
        parser.add_argument(*flags, action="store_true")
    try:
        line, rest = parser.parse_known_args(argv, CommandLine())
    except argparse.ArgumentError as error:
        name = next((word for word in argv if word in str(error.argument_name).split("/")), error.argument_name)
        raise UserError(f"{name} needs a value") from None
    if line.help:
        print(USAGE)
        raise SystemExit(0)
    line.overrides = [word for word in rest if not word.startswith("-")]
    unknown = [word.partition("=")[0] for word in rest if word.startswith("-")]
    if unknown:
        raise UserError("\n".join(f"unknown option '{name}': there are {_OPTIONS}" for name in unknown))
    return line


def parse_overrides(texts: Sequence[str]) -> tuple[list[Override], list[str]]:
    """The overrides that can be read, and one line for each that cannot."""
    parser = OverridesParser.create()
    parsed, mistakes = [], []
    for text in texts:
        try:
            override = _parse(parser, text)
        except HydraException:
            override = None
        if override is not None and override.key_or_group:
            parsed.append(override)
        else:
            mistakes.append(f"cannot read '{text}': {_advice(text)}")
    return parsed, mistakes


def _parse(parser: OverridesParser, text: str) -> Override:
    key, _, value = text.partition("=")
    quoted = f"{key}='{value}'"
    if key.endswith("_threshold") and _TWO_BOUNDS.fullmatch(value):
        return parser.parse_override(quoted)
    try:
        return parser.parse_override(text)
    except HydraException:
        if not value or _STRUCTURED.search(value):
            raise
        # A value outside Hydra's grammar without any list, dict or quote in it (a ~ path, a URL) is plain text.
        return parser.parse_override(quoted)


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


class Job(NamedTuple):
    """One job of a multirun: what tells it from the others, and the keys that vary."""

    label: str
    swept: tuple[str, ...]


def make_job(texts: Sequence[str], keys: Sequence[str]) -> Job | None:
    """The job of these overrides, None when nothing varies.

    Its label is fit for a folder name: `lam=0.9-lr=1e-06`, with full keys where short ones collide.
    """
    if not keys:
        return None
    values = {name: value for name, _, value in (text.lstrip("+").partition("=") for text in texts)}
    short = {key.rpartition(".")[2]: key for key in keys}
    names = short if len(short) == len(keys) else {key: key for key in keys}
    label = "-".join(f"{name}={values[key]}" for name, key in names.items())
    return Job(re.sub(r"[^\w.=+-]+", "_", label).strip("_"), tuple(keys))


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
