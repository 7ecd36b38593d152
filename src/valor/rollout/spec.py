"""What a generation engine tells of itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from valor.config.engine import ModelConfig
from valor.config.ppo import PPOConfig
from valor.config.rollout import RolloutConfig
from valor.rollout.base import RolloutEngine


@dataclass(frozen=True)
class BuildContext:
    """From what an engine is built, on every process that generates."""

    config: RolloutConfig
    model: ModelConfig
    eos_token_ids: Sequence[int]
    device: torch.device
    actor: Any  # the actor's engine (valor.engines.base.TrainingEngine); None: generation has processes of its own
    images: Mapping[str, Any] | None = None  # how the processor reads those of prompts; None: prompts are text
    records: bool = False  # outputs have their `routes`


@dataclass(frozen=True)
class GenerationEngineSpec:
    """An engine that `actor_rollout_ref.rollout.name` can name.

    Attributes:
        name: that name.
        plan: what a plan says about the engine's weights.
        build: makes the engine; what is slow to import is imported here.
        reads: fnmatch patterns of keys below actor_rollout_ref.rollout that not every engine reads, and this one does.
        check: contradictions that the configuration alone shows, one line each.
        check_start: UserError when the engine is not installed, or the model or that many processes do not fit it.
        weight_names: under which names it takes weights (see `valor.engines.base.WeightNames`).
        elsewhere: whether it generates on devices that are not the run's, so that its own processes need no GPU.
        records: whether it records which experts a token was given.
    """

    name: str
    plan: Callable[[PPOConfig], str]
    build: Callable[[BuildContext], RolloutEngine]
    reads: tuple[str, ...] = ()
    check: Callable[[PPOConfig], list[str]] = lambda config: []
    check_start: Callable[[PPOConfig, int], None] = lambda config, world_size: None
    weight_names: Literal["module", "checkpoint"] = "checkpoint"
    elsewhere: bool = False
    records: bool = False
