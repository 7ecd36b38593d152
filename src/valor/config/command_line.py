"""What is typed: options, and Hydra overrides one by one, so that every mistake is found and not just the first."""

import argparse
import re
from collections.abc import Sequence
from typing import Any

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
  --dry-run                            resolve, check, print the plan of the run, and stop

valor config keys [PREFIX] lists the keys."""

SWEEPS = "several runs are a sweep (valor lab sweep FILE.yaml)"
_OPTIONS = "--config-name (-cn), --config-path (-cp), --dry-run, --help"
_STRUCTURED = re.compile(r"[\[\]{}(),'\"\\]")
# "low_high" of a threshold; as a number, 0.5_5 would be 0.55.
_TWO_BOUNDS = re.compile(r"[\d.eE+-]+_[\d.eE+-]+")


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Split a command line; --help prints USAGE and exits. UserError: unknown options, options without their value."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-path", "--config-dir", "-cp", "-cd")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    try:
        line, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        name = next((word for word in argv if word in str(error.argument_name).split("/")), error.argument_name)
        raise UserError(f"{name} needs a value") from None
    if line.help:
        print(USAGE)
        raise SystemExit(0)
    line.overrides = [word for word in rest if not word.startswith("-")]
    unknown = [word.partition("=")[0] for word in rest if word.startswith("-")]
    advice = {name: SWEEPS if name in ("-m", "--multirun") else f"there are {_OPTIONS}" for name in unknown}
    if unknown:
        raise UserError("\n".join(f"unknown option '{name}': {text}" for name, text in advice.items()))
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


def literal(value: Any) -> str:
    """A value as an override writes it."""
    if isinstance(value, str):
        if value.startswith("${"):
            return value
        # The grammar reads backslashes as they are, but for those before a quote.
        return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value) + "'"
    if isinstance(value, list):
        return f"[{','.join(literal(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{literal(item)}" for key, item in value.items()) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
