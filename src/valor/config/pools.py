"""`resource_pools`: processes of their own for some roles."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PositiveInt

from valor.config.base import BARE_ITEM, Section

MovableRole = Literal["critic", "ref", "reward_model", "rollout"]


class PoolConfig(Section):
    """Processes for the named roles; the others share those of `trainer.nnodes` and `trainer.n_gpus_per_node`."""

    roles: Annotated[list[MovableRole], BARE_ITEM]
    """Who lives there: critic (with its ensemble), ref, reward_model, rollout (with weights of its own)."""
    nnodes: PositiveInt = 1
    """Nodes."""
    n_gpus_per_node: PositiveInt = 1
    """Processes (one per device) on each node."""
    num_threads: PositiveInt | None = None
    """CPU threads of each process; null is trainer.num_threads."""
