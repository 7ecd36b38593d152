"""What every section of the config tree has in common: frozen, closed, documented, and able to inherit a value."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def default_at(key: str) -> Any:
    """The value of `key` in a PPO tree where nothing is set."""
    from valor.config.inheritance import lookup
    from valor.config.ppo import PPOConfig

    return lookup(PPOConfig, {}, key)


def inherits(source: str) -> Any:
    """Field default: null takes the value of another key.

    `a.b.c` is a key from the root, `.c` a key of the same section (declared before this one), and a text with
    `${...}` references is filled in. `Inherits` is data on the field; `valor.config.inheritance` resolves it.
    """
    extra: dict[str, Any] = {"inherits": source}
    if source.startswith("."):
        return Field(default_factory=lambda data: data.get(source[1:]), json_schema_extra=extra)
    if "${." in source:
        return Field(
            default_factory=lambda data: REFERENCE.sub(lambda match: str(data.get(match[1][1:])), source),
            json_schema_extra=extra,
        )
    return Field(default_factory=lambda: default_at(source), json_schema_extra=extra)


def inherited_from(cls: type[BaseModel], name: str) -> str | None:
    """What field `name` inherits from, or None."""
    extra = cls.model_fields[name].json_schema_extra
    return extra.get("inherits") if isinstance(extra, dict) else None  # type: ignore[return-value]


class Section(BaseModel):
    """A frozen group of keys; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        validate_default=True,
        protected_namespaces=(),
    )

    def contradictions(self, at: str) -> list[str]:
        """Keys of this section that do not go together, a line each; `at`: the section's own key, with a dot."""
        return []

    @model_validator(mode="before")
    @classmethod
    def _null_means_inherit(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            key: value
            for key, value in data.items()
            if not (value is None and key in cls.model_fields and inherited_from(cls, key))
        }

    @field_validator("*", mode="before")
    @classmethod
    def _no_disguised_types(cls, value: Any, info: Any) -> Any:
        if value == "None":
            raise ValueError("write null, not None")
        if isinstance(value, bool) and not _mentions(cls.model_fields[info.field_name].annotation, bool):
            raise ValueError("true/false is not a value for this key")
        return value


def all_contradictions(section: Section, at: str = "") -> list[str]:
    """The contradictions of `section` and of those below it; one that is off (`enable`: false) is not asked."""
    if getattr(section, "enable", True) is False:
        return []
    lines = section.contradictions(at)
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            lines += all_contradictions(value, f"{at}{name}.")
    return lines


def _mentions(annotation: Any, kind: type) -> bool:
    return annotation in (kind, Any) or any(_mentions(part, kind) for part in get_args(annotation))


def _long_dtype(value: Any) -> Any:
    return {"bf16": "bfloat16", "fp32": "float32", "float": "float32"}.get(value, value) if _is_text(value) else value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _as_list(value: Any) -> Any:
    return [value] if _is_text(value) else value


DType = Annotated[Literal["bfloat16", "float32"], BeforeValidator(_long_dtype)]
"""Floating-point format; bf16 and fp32 are accepted spellings."""

PathStr = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path (a leading ~ is expanded) or a Hugging Face hub id."""

BARE_ITEM = BeforeValidator(_as_list)
"""Marks a list whose single item may be written without brackets."""

PathList = Annotated[list[PathStr], BARE_ITEM]
"""One path or a list of paths; always a list after validation."""

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


def _check_step_range(text: str) -> str:
    step_range(text)
    return text


StepRange = Annotated[str, AfterValidator(_check_step_range)]
"""Steps, counted from 1: `1-50`, `7`, `80-`."""

StepRanges = Annotated[list[StepRange], BARE_ITEM]
"""One range of steps or a list of them."""

CountOrOff = Annotated[int, Field(ge=-1)]
"""A count; -1 switches it off."""
