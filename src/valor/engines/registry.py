"""Training engines by the name that a role's `strategy` gives."""

from __future__ import annotations

from valor.algorithms.registry import Named
from valor.engines.base import BuildEngine
from valor.engines.fsdp.engine import build_fsdp

DEFAULT_STRATEGY = "fsdp2"  # of roles whose section has no key for it
_ENGINES = Named[BuildEngine]("strategy", {DEFAULT_STRATEGY: build_fsdp})


def register_training_engine(name: str, build: BuildEngine) -> None:
    """Make `build` the engine of `strategy=name`, in place of another one of that name."""
    _ENGINES[name] = build


def training_engine(strategy: str) -> BuildEngine:
    """What builds the engine of that name. UserError: there is none."""
    return _ENGINES[strategy]
