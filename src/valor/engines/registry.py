"""Training engines by the name that a role's `strategy` gives."""

from valor.algorithms.registry import Named
from valor.engines.base import BuildEngine
from valor.engines.fsdp.engine import build_fsdp

DEFAULT_STRATEGY = "fsdp2"  # of roles whose section has no key for it
TRAINING_ENGINES = Named[BuildEngine]("strategy", {DEFAULT_STRATEGY: build_fsdp})
