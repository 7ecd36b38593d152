"""Training engines by the name that a role's `strategy` gives."""

from typing import Any

from valor.algorithms.registry import Named
from valor.engines.base import BuildEngine, TrainingEngine
from valor.engines.fsdp.engine import build_fsdp
from valor.errors import UserError

DEFAULT_STRATEGY = "fsdp2"  # of roles whose section has no key for it


def _build_megatron(*args: Any, **options: Any) -> TrainingEngine:
    try:
        from valor.engines.megatron.engine import build_megatron
    except ModuleNotFoundError as error:
        raise UserError(
            f"strategy=megatron needs '{error.name}', which is not installed: pip install 'valor-rl[megatron]'"
        ) from error
    return build_megatron(*args, **options)


TRAINING_ENGINES = Named[BuildEngine]("strategy", {DEFAULT_STRATEGY: build_fsdp, "megatron": _build_megatron})
