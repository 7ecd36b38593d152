"""What `valor config keys` prints, from the schema."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from valor.config.base import inherited_from
from valor.config.field_types import type_text
from valor.config.inheritance import absolute
from valor.config.names import unknown_key
from valor.config.ppo import PPOConfig
from valor.config.tree import walk_keys
from valor.errors import UserError


def describe_keys(prefix: str = "", root: type[BaseModel] = PPOConfig) -> str:
    """A line per key below `prefix`: key, type, default, meaning. UserError: nothing has that prefix."""
    rows = [
        (
            key,
            _compact(type_text(section, name)),
            default_text(section, name, key),
            doc_text(section, name),
        )
        for key, section, name in walk_keys(root)
        if not prefix or key == prefix or key.startswith(prefix if prefix.endswith(".") else f"{prefix}.")
    ]
    if not rows:
        raise UserError(unknown_key(root, prefix))
    widths = [min(max(len(row[column]) for row in rows), limit) for column, limit in ((0, 80), (1, 34), (2, 48))]
    return "\n".join(_aligned(row, widths) for row in rows)


def _compact(text: str) -> str:
    """Choices as `a|b|c`, to keep the columns narrow."""
    return text.replace("one of ", "").replace("any of ", "").replace(", ", "|")


def _aligned(row: tuple[str, str, str, str], widths: list[int]) -> str:
    cells = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
    return "  ".join([*cells, row[3]]).rstrip()


def doc_text(section: type[BaseModel], name: str) -> str:
    """The doc string of a field."""
    return section.model_fields[name].description or ""


def default_text(section: type[BaseModel], name: str, key: str) -> str:
    """The default of field `name` at `key`; `= other.key` where it is inherited."""
    source = inherited_from(section, name)
    if source is not None:
        return source.replace("${.", "${") if "${" in source else f"= {absolute(source, key)}"
    field = section.model_fields[name]
    if isinstance(field.json_schema_extra, dict) and "derived" in field.json_schema_extra:
        return str(field.json_schema_extra["derived"])
    return literal_text(field.get_default(call_default_factory=True))


def literal_text(value: Any) -> str:
    """A value as one types it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(literal_text(item) for item in value)}]"
    return str(value)
