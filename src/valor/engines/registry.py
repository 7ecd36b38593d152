"""Training engines by the name that `strategy` gives."""

from __future__ import annotations

from difflib import get_close_matches

from valor.engines.base import BuildEngine
from valor.engines.fsdp.engine import build_fsdp
from valor.errors import UserError

_ENGINES: dict[str, BuildEngine] = {"fsdp2": build_fsdp, "fsdp": build_fsdp}
DEFAULT_STRATEGY = "fsdp2"  # of roles whose section has no key for it


def register_training_engine(name: str, build: BuildEngine) -> None:
    """Make `build` the engine of `strategy=name`. ValueError for a name that is taken."""
    if name in _ENGINES:
        raise ValueError(f"there is a training engine '{name}' already")
    _ENGINES[name] = build


def training_engine(strategy: str) -> BuildEngine:
    """What builds the engine of that name. UserError: there is none."""
    if strategy not in _ENGINES:
        near = get_close_matches(strategy, _ENGINES, n=1)
        known = ", ".join([*near, *(name for name in _ENGINES if name not in near)])
        raise UserError(f"there is no training engine '{strategy}': set strategy to one of {known}")
    return _ENGINES[strategy]
