"""What a phase of a training step is: columns in, columns out, in the processes of one role or in the driver."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from valor.collector.collector import Collector
from valor.config import PPOConfig
from valor.controller.group import Pools
from valor.data.batch import Batch, Episodes
from valor.trainer.updates import Critics, Updates

Metrics = dict[str, Any]

COLLECTED = frozenset(
    [
        "prompts",
        "prompt_lengths",
        "responses",
        "response_lengths",
        "response_mask",
        "rollout_log_probs",
        "token_level_scores",
        "episode_key",
        "uid",
        "data_source",
        "ground_truth",
        "extra_info",
        "response_text",
        "finish_reason",
        "reward_info",
    ]
)
"""Columns of every collected batch. [B, T]: response_mask, rollout_log_probs, token_level_scores."""

COLLECTED_SOMETIMES = frozenset(("episode", "turn_ids", "reward_baselines", "progress"))
"""Columns of some: rows of an episode, turn of each token, ReMax's baseline, a prover's progress."""

EVERY_COLUMN = frozenset(("*",))


@dataclass(frozen=True)
class Resources:
    """What the phases of a run work with."""

    roles: Pools
    collector: Collector
    updates: Updates
    critics: Critics
    record: Any


class Phase:
    """One phase of `train_step`.

    A subclass says when a run wants it, which columns it reads and adds, and what it does. A phase sees the columns
    that it declares and no others; it runs as soon as the phases before it in the list have added them.

    role: it runs in the processes of this role; None: in the driver. trains: it updates that role's weights. reads:
    columns that must be there. reads_if_there: columns that some runs lack. adds: columns of its result; one that is
    there already is replaced. resources: set before the first step.
    """

    name: ClassVar[str]
    role: ClassVar[str | None] = None
    trains: ClassVar[bool] = False
    reads: frozenset[str] = frozenset()
    reads_if_there: frozenset[str] = frozenset()
    adds: frozenset[str] = frozenset()
    resources: Resources

    def __init__(self, config: PPOConfig) -> None:
        self.config = config

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        """Whether a run of `config` has this phase."""
        return True

    @classmethod
    def contradictions(cls, config: PPOConfig) -> Iterator[str]:
        """What does not go with this phase in a run that has it, a line each."""
        yield from ()

    def plan(self) -> str:
        """The phase's row in the plan."""
        summary = (type(self).__doc__ or self.name).partition("\n")[0].rstrip(".")
        return summary[0].lower() + summary[1:]

    def refuse(self, batch: Batch) -> None:
        """Before the step's phases begin: StepRefused where this phase cannot be right for the collected rows."""

    def timing(self, batch: Batch, step: int) -> str | None:
        """Under which name the seconds of `run` are counted; None: they are not."""
        return self.name

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        """The columns that the phase adds, and its metrics."""
        raise NotImplementedError

    def state_dict(self) -> Mapping[str, Any]:
        """What a resumed run has to know, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""


def of_rows(episodes: Episodes, columns: Mapping[str, Tensor]) -> Batch:
    """Columns of joined episodes, [E, K T] or [E], as columns of their rows, [B, T] or [B]."""
    if not episodes.forked:
        return Batch(columns)
    return Batch({name: episodes.part(x) if x.ndim == 2 else episodes.spread(x) for name, x in columns.items()})
