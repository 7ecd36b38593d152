"""The resolved configuration as a yaml file, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from omegaconf import OmegaConf
from pydantic import BaseModel, ValidationError

from valor.config.mistakes import describe_errors
from valor.config.ppo import PPOConfig
from valor.errors import UserError

Root = TypeVar("Root", bound=BaseModel)


def dump_yaml(config: BaseModel) -> str:
    """Every key with its value; `load_yaml`, and --config-path/--config-name, read it back to an equal tree."""
    return OmegaConf.to_yaml(
        OmegaConf.create({key: _escaped(value) for key, value in config.model_dump(mode="json").items()})
    )


def load_yaml(path: Path, root: type[Root] = PPOConfig) -> Root:
    """The tree that `dump_yaml` wrote. UserError: no such file, or not such a tree."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        raise UserError("\n".join(f"{path}: {line}" for line in describe_errors(root, error, ()))) from error


def _escaped(value: object) -> object:
    """Text with `${` in it protected, so that it is not taken for an interpolation."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
