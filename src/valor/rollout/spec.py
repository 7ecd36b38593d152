"""What a generation engine tells of itself; imports no torch, so that a plan is made in no time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from valor.config.model import ModelConfig
from valor.config.ppo import PPOConfig
from valor.config.rollout import RolloutConfig

if TYPE_CHECKING:
    import torch

    from valor.rollout.base import RolloutEngine


class TrainingNeighbour(Protocol):
    """The actor's training engine in the same process, as far as generation may use it."""

    @property
    def whole_module(self) -> Any:
        """The transformers model to generate with inside `unsharded`; None: this process holds only parts of it."""
        ...

    def unsharded(self) -> AbstractContextManager[Any]:
        """The parameters of `whole_module` are whole inside."""
        ...


@dataclass(frozen=True)
class BuildContext:
    """From what an engine is built, on every process that generates."""

    config: RolloutConfig
    model: ModelConfig
    eos_token_ids: Sequence[int]
    device: torch.device
    actor: TrainingNeighbour | None  # None: generation has processes of its own


@dataclass(frozen=True)
class GenerationEngineSpec:
    """An engine that `actor_rollout_ref.rollout.name` can name.

    Attributes:
        name: that name.
        reads: fnmatch patterns of keys below actor_rollout_ref.rollout that not every engine reads, and this one does.
        check: contradictions that the configuration alone shows, one line each.
        check_start: UserError when the engine is not installed, or the model or that many processes do not fit it.
        plan: what a plan says about the engine's weights.
        build: makes the engine; what it needs is imported here.
        weight_names: under which names it takes weights (see `valor.engines.base.WeightNames`).
    """

    name: str
    reads: tuple[str, ...]
    check: Callable[[PPOConfig], list[str]]
    check_start: Callable[[PPOConfig, int], None]
    plan: Callable[[PPOConfig], str]
    build: Callable[[BuildContext], RolloutEngine]
    weight_names: Literal["module", "checkpoint"] = "checkpoint"
