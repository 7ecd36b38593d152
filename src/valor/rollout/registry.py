"""Generation engines by the name that `actor_rollout_ref.rollout.name` gives."""

from __future__ import annotations

from valor.algorithms.registry import Named
from valor.rollout.native.spec import NATIVE
from valor.rollout.server.checks import SERVER
from valor.rollout.spec import GenerationEngineSpec
from valor.rollout.vllm.options import VLLM

_ENGINES = Named("actor_rollout_ref.rollout.name", {spec.name: spec for spec in (NATIVE, VLLM, SERVER)})


def register_generation_engine(spec: GenerationEngineSpec) -> None:
    """Make `spec` known under its name, in place of another one of that name."""
    _ENGINES[spec.name] = spec


def generation_engine(name: str) -> GenerationEngineSpec:
    """The engine of that name. UserError: there is none."""
    return _ENGINES[name]


def generation_engines() -> list[GenerationEngineSpec]:
    """All that are registered."""
    return list(_ENGINES.values())
