"""Generation engines by the name that `actor_rollout_ref.rollout.name` gives."""

from __future__ import annotations

from difflib import get_close_matches

from valor.errors import UserError
from valor.rollout.native.spec import NATIVE
from valor.rollout.server.spec import SERVER
from valor.rollout.spec import BuildContext, GenerationEngineSpec
from valor.rollout.vllm.spec import VLLM

__all__ = [
    "BuildContext",
    "GenerationEngineSpec",
    "generation_engine",
    "generation_engines",
    "register_generation_engine",
]

_ENGINES = {spec.name: spec for spec in (NATIVE, VLLM, SERVER)}


def register_generation_engine(spec: GenerationEngineSpec) -> None:
    """Make `spec` known under its name. ValueError for a name that is taken."""
    if spec.name in _ENGINES:
        raise ValueError(f"there is a generation engine '{spec.name}' already")
    _ENGINES[spec.name] = spec


def generation_engine(name: str) -> GenerationEngineSpec:
    """The engine of that name. UserError: there is none."""
    if name not in _ENGINES:
        near = get_close_matches(name, _ENGINES, n=1)
        known = ", ".join([*near, *(one for one in _ENGINES if one not in near)])
        raise UserError(f"actor_rollout_ref.rollout.name={name}: there is no such engine, set it to one of {known}")
    return _ENGINES[name]


def generation_engines() -> list[GenerationEngineSpec]:
    """All that are registered."""
    return list(_ENGINES.values())
