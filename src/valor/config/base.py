"""How a section of the config tree and its keys are declared: frozen, closed, documented, with their own rules."""

import os
import re
from collections.abc import Iterator, Mapping
from copy import copy
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from valor.config.inheritance import fill_inherited
from valor.config.tree import schema

Rules = str | Mapping[str, str]

_LARGEST = 2**62  # of whole numbers: a seed of an ensemble's member, say, is this and a little more
_LONGEST_PATH = 3800  # bytes, so that there is room for the names of files below
_TEXT = re.compile(r"[^\0\ud800-\udfff]*")  # neither NUL nor half of a surrogate pair


def key(default: Any, only_with: Rules = "", **more: str) -> Any:
    """Field default of a key that has rules.

    `only_with`: where the key has an effect: `KEY` (is set, is not 0), `KEY=value` or `KEY!=value`, several joined by
    ` or `. KEY is dotted from the root, `.name` is in the same section, and both may be properties. A mapping gives
    several conditions, each with the reason to show ("": made from the condition).
    `derived`: what null means, in words; the root fills it in. `within`: the key that null, or a default that is more,
    takes its value from.
    """
    return Field(default, json_schema_extra=_extra(only_with, **more))


def inherits(source: str, only_with: Rules = "", **more: str) -> Any:
    """Field default: null takes the value of `source`, see `valor.config.inheritance`; `a.b` is short for `${a.b}`."""
    return Field(None, json_schema_extra=_extra(only_with, inherits=_reference(source), **more))


def follows(source: str, default: Any = None) -> Any:
    """Field default of what no user sets: the value of `source`; in a section that is made alone `default`."""
    return Field(default, exclude=True, json_schema_extra={"inherits": _reference(source), "hidden": True})


def hidden(value: Any) -> Any:
    """Field default of what no user sets, and which is always `value`."""
    return Field(value, exclude=True, json_schema_extra={"hidden": True})


def section(cls: type[BaseModel], only_with: Rules = "") -> Any:
    """Field default of a section: its own defaults. `only_with` holds for each of its keys."""
    return Field(default_factory=cls, exclude=not schema(cls), json_schema_extra=_extra(only_with))


def _reference(source: str) -> str:
    return source if "${" in source else f"${{{source}}}"


def _extra(only_with: Rules, **more: str) -> dict[str, Any]:
    conditions = {only_with: ""} if isinstance(only_with, str) else dict(only_with)
    return {"only_with": {condition: reason for condition, reason in conditions.items() if condition}, **more}


def is_set(value: Any) -> bool:
    """Whether a value asks for something."""
    return value not in (None, False, 0, "", [], {})


class Section(BaseModel):
    """A frozen group of keys; unknown keys are errors.

    `class Mine(Theirs, lr=1e-5)` is Theirs with other defaults: values, `key(...)`, `inherits(...)`, `follows(...)`.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        validate_default=True,
        protected_namespaces=(),
    )

    def __init_subclass__(cls, **defaults: Any) -> None:
        super().__init_subclass__()

    @classmethod
    def __pydantic_init_subclass__(cls, **defaults: Any) -> None:
        for name, default in defaults.items():
            field = cls.model_fields[name] = copy(cls.model_fields[name])
            declared = default if isinstance(default, FieldInfo) else Field(default)
            field.default, field.default_factory = declared.default, declared.default_factory
            field.json_schema_extra = declared.json_schema_extra or field.json_schema_extra
            field.exclude = declared.exclude
        if defaults:
            cls.model_rebuild(force=True)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        return fill_inherited(cls, data) if isinstance(data, dict) else data

    def get(self, name: str, default: Any = None) -> Any:
        """A key's value, as of a dictionary: classes that were written for verl's configuration ask that way."""
        return getattr(self, name, default)

    def contradictions(self, at: str) -> Iterator[str]:
        """Keys of this section that do not go together, a line each; `at`: the section's own key, with a dot."""
        yield from ()

    def unused(self) -> dict[str, str]:
        """Of a root: patterns of keys (joined by spaces) that this kind of run does not read, by the reason."""
        return {}

    @field_validator("*", mode="before")
    @classmethod
    def _as_typed(cls, value: Any, info: Any) -> Any:
        """The value, in a list where the key takes lists alone. ValueError: a type that pydantic would convert."""
        annotation = cls.model_fields[info.field_name].annotation
        if value == "None":
            raise ValueError("write null, not None")
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError("whole numbers go up to 2**62, this one is beyond")
        if isinstance(value, str) and not _TEXT.fullmatch(value):
            raise ValueError(f"{value[:40]!r} has characters that are no text")
        if isinstance(value, bool) and not _mentions(annotation, bool):
            raise ValueError("true/false is not a value for this key")
        return [value] if isinstance(value, str | int | float) and takes_lists(annotation) else value


def takes_lists(annotation: Any) -> bool:
    """Whether every value of this type is a list, or null."""
    if get_origin(annotation) in (Union, UnionType):
        return all(part is NoneType or takes_lists(part) for part in get_args(annotation))
    return get_origin(annotation) is list


def takes_texts(annotation: Any) -> bool:
    """Whether every value of this type is a text, a list of texts, or null."""
    return _mentions(annotation, str) and not any(_mentions(annotation, kind) for kind in (int, float))


def _mentions(annotation: Any, kind: type) -> bool:
    return annotation in (kind, Any) or any(_mentions(part, kind) for part in get_args(annotation))


def also(**spellings: str) -> BeforeValidator:
    """Other spellings of values of a key, and the values that they mean."""
    return BeforeValidator(lambda value: spellings.get(str(value), value))


DType = Annotated[Literal["bfloat16", "float32"], also(bf16="bfloat16", fp32="float32", float="float32")]
"""Floating-point format."""

Strategy = Annotated[str, also(fsdp="fsdp2")]
"""Name of a training engine."""


def as_path(text: str) -> str:
    """The path, its leading ~ expanded. ValueError: no file system has such a one."""
    path = os.path.expanduser(text)
    if not _TEXT.fullmatch(path):
        raise ValueError(f"{path[:40]!r} has characters that are no text")
    if len(path.encode()) > _LONGEST_PATH or any(len(name.encode()) > 255 for name in path.split("/")):
        raise ValueError(f"a path has names of at most 255 bytes and {_LONGEST_PATH} in all, got '{path[:40]}…'")
    return path


PathStr = Annotated[str, AfterValidator(as_path)]
"""A path (a leading ~ is expanded) or a Hugging Face hub id."""


def _not_empty(path: str) -> str:
    if not path:
        raise ValueError("expected the path of a folder, got nothing: is a variable of the shell not set?")
    return path


FolderStr = Annotated[PathStr, AfterValidator(_not_empty)]
"""Where files are written: empty, they would go into the working directory."""

PathList = list[PathStr]
"""One path or a list of paths; always a list after validation."""

Seed = Annotated[int, Field(ge=0)]
"""A seed: 0 or more."""

Share = Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1."""

PositiveShare = Annotated[float, Field(gt=0, le=1)]
"""A number above 0, at most 1."""

_STEP_RANGE = re.compile(r"([1-9]\d*)(?:-([1-9]\d*)?)?")


def step_range(text: str) -> range:
    """`1-50`, `7` or `80-` (no end) as a range of steps. ValueError when it is not of that form."""
    match = _STEP_RANGE.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or 2**62) if "-" in text else int(match[1])) if match else (0, 0)
    if not first or last < first:
        raise ValueError(f"'{text}' is no range of steps: write 1-50, 7, or 80- (to the end)")
    return range(first, last + 1)


StepRanges = list[Annotated[str, AfterValidator(lambda text: step_range(text) and text)]]
"""One range of steps, counted from 1 (`1-50`, `7`, `80-`), or a list of them."""

CountOrOff = Annotated[int, Field(ge=-1)]
"""A count; -1 switches it off."""
