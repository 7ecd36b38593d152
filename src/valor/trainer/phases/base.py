"""What a phase of a training step is: columns in, columns out, in the processes of one role or in the driver."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from valor.algorithms.registry import Entry
from valor.collector.collector import Collector
from valor.config import PPOConfig
from valor.controller.group import Pools
from valor.data.batch import Batch, Episodes
from valor.trainer.updates import Critics, Updates

Metrics = dict[str, Any]

_COLLECTED = """
    prompts prompt_lengths responses response_lengths response_mask rollout_log_probs token_level_scores episode_key
    uid data_source ground_truth extra_info response_text finish_reason reward_info
"""
COLLECTED = frozenset(_COLLECTED.split())
"""Columns of every collected batch. [B, T]: response_mask, rollout_log_probs, token_level_scores."""

COLLECTED_SOMETIMES = frozenset(("episode", "turn_ids", "reward_baselines", "progress", "images", "routes"))
"""Columns of some batches: rows of an episode, turn of each token, ReMax's baseline, a prover's progress, the prompts'
images (which a phase that reads `prompts` gets too), the experts of each token."""

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
    """One phase of a training step: a pass of a model, a computation on the batch, or an update.

    A subclass states when a run has it (`wanted`), what it cannot be combined with (`contradictions`), the columns that
    it reads and adds, and what it does (`run`). It is given the columns it declares and no others, and starts as soon
    as the earlier phases in the list have added them and the processes of its role are free.

    Attributes:
        role: the role whose processes it uses; None: it computes in the driver. trains: it updates the role's weights.
        reads: columns that must exist. reads_if_there: columns that only some runs have.
        adds: columns of its result; a column that exists already is replaced.
        timer: the name under which its seconds are counted; empty: its own name.
        resources: workers, collector and recorder of the run, set before the first step.
    """

    name: ClassVar[str]
    role: ClassVar[str | None] = None
    trains: ClassVar[bool] = False
    timer: ClassVar[str] = ""
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
        """Settings that cannot be combined in a run that has this phase, a line each. May raise UserError instead."""
        yield from ()

    def plan(self) -> str:
        """Its row in the plan; default: the first line of its docstring."""
        summary = (type(self).__doc__ or self.name).partition("\n")[0].rstrip(".")
        return summary[0].lower() + summary[1:]

    def refuse(self, batch: Batch) -> None:
        """Called before any phase of the step. StepRefused: the collected rows are ones it cannot handle."""

    def skips(self, batch: Batch, step: int) -> bool:
        """Whether it has nothing to do in this step."""
        return False

    def timing(self, batch: Batch, step: int) -> str:
        """The name under which the seconds of `run` are counted."""
        return self.timer or self.name

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        """Returns the added columns and the phase's metrics."""
        raise NotImplementedError

    def state_dict(self) -> Mapping[str, Any]:
        """What a resumed run needs to know, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`."""

    def save(self, folder: Path) -> None:
        """Writes the tensors that a resumed run needs into `folder`, the phase's own in a checkpoint."""

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote; called where there is something."""


def of_rows(episodes: Episodes, columns: Mapping[str, Tensor]) -> Batch:
    """Columns of joined episodes, [E, K T] or [E], as columns of their rows, [B, T] or [B]."""
    if not episodes.forked:
        return Batch(columns)
    return Batch({name: episodes.part(x) if x.ndim == 2 else episodes.spread(x) for name, x in columns.items()})


def where_true(wrong: Mapping[str, bool]) -> Iterator[str]:
    """The lines whose condition holds."""
    return (line for line, holds in wrong.items() if holds)


def option_mistakes(
    entry: Entry, key: str, names: Collection[str], options: Collection[str], provided: Collection[str] = ()
) -> Iterator[str]:
    """A line for each of the `names` set under `key` that is not among the `options` of the algorithm, or that has a
    source of its own (`provided`: other keys and the run)."""
    for name in names:
        if name in provided:
            yield f"{key}.{name} is not set here: it has a key of its own or comes from the run"
        elif name not in options and not entry.takes_any:
            known = ", ".join(sorted(set(options) - set(provided))) or "none"
            yield f"{key}.{name}: {entry.name} has no such option (it has {known})"
