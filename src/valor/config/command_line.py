"""What is typed: options, and Hydra overrides one by one, so that every mistake is found and not just the first; and
settings of a Python call, which are written as such overrides."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from itertools import accumulate
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import click
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from yaml import MappingNode, Node, ScalarNode, SequenceNode, YAMLError, compose

from valor.config.inheritance import lookup
from valor.config.tree import exists, is_section, plain_keys, schema
from valor.config.verl import find_spelling
from valor.errors import UserError

SWEEPS = "several runs are a sweep (valor lab sweep FILE.yaml)"
_OPTIONS = "--config-name (-cn), --config-path (-cp), --dry-run, --help"
_STRUCTURED = re.compile(r"[\[\]{}(),'\"\\]")
_PATH = re.compile(r"[^\[{(,'\"\\][^,'\"\\]*/[^,'\"\\]*|[~/][^,'\"\\]*")  # whatever brackets are in it
_BARE = re.compile(r"(?!(?:null|true|false|inf|nan|none)$)/?[a-z][\w./-]*", re.IGNORECASE)  # a text needs no quotes
# "low_high" of a threshold; as a number, 0.5_5 would be 0.55.
_PLACEHOLDER = re.compile(r"\{\w+\}")
_TWO_BOUNDS = re.compile(r"[\d.eE+-]+_[\d.eE+-]+")


def _complete(ctx: click.Context, _: click.Parameter, start: str) -> list[str]:
    """For a shell: the keys of this command that begin so."""
    from valor.config.presets import COMMANDS

    name = ctx.command_path.partition(" ")[2]
    return [f"{key.name}=" for key in plain_keys(COMMANDS[name]) if key.name.startswith(start)]


LINE = click.Command(
    "run",
    params=[
        click.Argument(["overrides"], nargs=-1, type=click.UNPROCESSED, metavar="KEY=VALUE…", shell_complete=_complete),
        click.Option(["--config-name", "-cn"], metavar="NAME", help="Start from a named configuration, or NAME.yaml."),
        click.Option(["--config-path", "--config-dir", "-cp", "-cd"], metavar="DIR", help="Where that yaml file is."),
        click.Option(["--dry-run"], is_flag=True, help="Resolve, check, print the plan of the run, and stop."),
    ],
    context_settings={"help_option_names": ["-h", "--help"], "ignore_unknown_options": True},
)
"""The words of a run."""


def read_arguments(argv: Sequence[str]) -> SimpleNamespace:
    """Split a command line; --help prints what there is and exits. UserError: unknown options, or without a value."""
    try:
        line = SimpleNamespace(**LINE.make_context("valor ppo|sft|rm train", list(argv)).params)
    except click.exceptions.Exit as end:
        raise SystemExit(end.exit_code) from None
    except click.BadOptionUsage as error:
        raise UserError(f"{error.option_name} needs a value") from None
    unknown = [word.partition("=")[0] for word in line.overrides if word.startswith("-")]
    advice = {name: SWEEPS if name in ("-m", "--multirun") else f"there are {_OPTIONS}" for name in unknown}
    advice |= {name: f"a setting is written {name[2:]}=VALUE" for name in unknown if "_" in name or "." in name}
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
        except (HydraException, YAMLError, OmegaConfBaseException):
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
        if not value:
            raise
        if _STRUCTURED.search(_PLACEHOLDER.sub("", value)) and not _PATH.fullmatch(value):
            if value[0] not in "[{":
                raise
            # JSON, and texts without quotes that the grammar does not have (~/a.parquet, a URL): such is YAML too.
            return parser.parse_override(f"{key}={_requoted(parser, compose(value))}")
        # A value outside Hydra's grammar without any list, dict or quote in it (a ~ path, a URL, a text with {names})
        # is plain text.
        return parser.parse_override(quoted)


def _requoted(parser: OverridesParser, node: Node) -> str:
    """YAML in Hydra's grammar, with quotes around what is a text there or is none without them."""
    if isinstance(node, MappingNode):
        return "{" + ",".join(f"{key.value}:{_requoted(parser, item)}" for key, item in node.value) + "}"
    if isinstance(node, SequenceNode):
        return f"[{','.join(_requoted(parser, item) for item in node.value)}]"
    with suppress(HydraException):
        if (
            isinstance(node, ScalarNode) and node.style is None and not _STRUCTURED.search(node.value)
        ):  # 1e-5, true, on: as in a value that it can read
            parser.parse_override(f"key={node.value or 'null'}")
            return node.value or "null"
    return literal(node.value)


def _advice(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals:
        return "write key=value"
    if not re.fullmatch(r"[+~]*[A-Za-z_][\w./@:-]*", key):
        return "the part before = must be a dotted key"
    for opening, closing in ("[]", "{}", "()"):
        if value.count(opening) != value.count(closing):
            return f"'{opening}' and '{closing}' do not match"
    if value[:1] in ("[", "{"):
        return f"quote each text in it, and all of it for the shell: \"{key}=['...','...']\""
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


def overrides(root: type[BaseModel], settings: Mapping[str, Any]) -> list[str]:
    """`key=value` for each setting; what is wrong with a key or a value is for whoever loads them to say.

    A name is a key with `.` or `__` between its parts, or the end of one key alone: `train_batch_size`, `rollout.n`.
    A dict under the name of a section sets keys of it. UserError: a name that several keys end with.
    """
    return [f"{key}={_as_text(root, key, value)}" for key, value in _keys(root, settings)]


def _as_text(root: type[BaseModel], key: str, value: Any) -> str:
    try:
        return written(_plain(value, key))
    except UserError:
        spelling = find_spelling(root, key, None)
        if spelling is None or not spelling[0].answered:
            raise
        return type(value).__name__  # under TRL's `tools`, say, whose line says what to set, whatever it is


def written(value: Any) -> str:
    """A value as an override writes it, without quotes where it needs none."""
    return value if isinstance(value, str) and _BARE.fullmatch(value) else literal(value)


def _keys(root: type[BaseModel], settings: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        key = section + name if section else _whole(root, name.replace("__", "."))
        if is_section(root, key) and isinstance(value, Mapping):
            yield from _keys(root, value, f"{key}.")
        else:
            yield key, value


def _whole(root: type[BaseModel], name: str) -> str:
    ends = [key for key in schema(root) if key.endswith(f".{name}")]
    if len(ends) > 1:  # of a part that is off by default more has to be written
        ends = [key for key in ends if not _off_by_default(root, key)] or ends
    spelling = find_spelling(root, name, None)
    # TRL's `beta` is no part of a section that is off, but asks for two keys.
    is_answered = spelling is not None and spelling[0].answered and any(_switches(root, end) for end in ends)
    if exists(root, name) or not ends or is_answered or (len(ends) > 1 and spelling):
        return name
    if len(ends) > 1:
        raise UserError(f"{name}: which one is meant? {', '.join(ends)}: write more of it, with __ for the dots")
    return ends[0]


def _off_by_default(root: type[BaseModel], key: str) -> bool:
    switches = _switches(root, key.rpartition(".")[0])
    return any(switch in schema(root) and lookup(root, {}, switch) is False for switch in switches)


def _switches(root: type[BaseModel], key: str) -> list[str]:
    """What the key, and the sections that it is in, need to have an effect."""
    sections = [schema(root)[name] for name in accumulate(key.split("."), "{}.{}".format) if name in schema(root)]
    return [switch for section in sections for switch in section.declared("only_with") or ()]


def _plain(value: Any, key: str) -> Any:
    """Numbers, texts, lists and dicts as a command line has them."""
    value = value.value if isinstance(value, Enum) else value
    if hasattr(value, "tolist"):  # of NumPy or torch
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(item, key) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, key) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = getattr(value, "__name__", None)  # of a function or a class
    hint = f": write it into a file, and give its name as file.py:{name}" if name else ""
    raise UserError(f"{key}: a setting is a number, a text, a list or a dict, got {type(value).__name__}{hint}")
