"""The rows of a step: a shuffled epoch that is a function of (seed, epoch) alone.

All randomness is a function of a key, so that a resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from valor.errors import UserError

if TYPE_CHECKING:
    from valor.data.batch import Batch

# Third words of random keys (seed, 0, stream): an epoch's order has the key (seed, epoch), the same as a third word 0.
SUBSET_STREAM = 1
DIFFICULTY_STREAM = 2


def shuffled(num_rows: int, *key: int) -> np.ndarray:
    """A permutation of 0 … num_rows−1 that depends on `key` alone, on every machine and NumPy version.

    Raw Philox words are sorted: NumPy guarantees the bit stream of a generator, but not what `permutation` makes of it.
    """
    return np.argsort(words(num_rows, *key), kind="stable")


def words(count: int, *key: int) -> np.ndarray:
    """Random integers below 2^64."""
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(count)


def keyed_generator(*key: int) -> torch.Generator:
    """A CPU generator seeded by non-negative integers, such as (run seed, step, what it is for)."""
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed >> 1)  # torch takes a signed number


def subset(num_rows: int, limit: int, *key: int, shuffle: bool = True) -> list[int]:
    """At most `limit` row numbers, ascending: drawn by `key`, or the first ones. A limit of 0 or less means all."""
    if not 0 < limit < num_rows:
        return list(range(num_rows))
    return sorted(shuffled(num_rows, *key)[:limit].tolist()) if shuffle else list(range(limit))


class PromptSampler:
    """Batches of row numbers: every row at most once an epoch, no batch across two epochs.

    With `drop_last` the rows at the end of an epoch that fill no batch are left out (others the next time, as the
    order changes); without it the last batch is shorter. Position is counted in rows, so a run may resume with
    another batch size. Raises UserError when there are fewer rows than one batch needs.
    """

    def __init__(
        self, num_rows: int, batch_size: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = True
    ) -> None:
        if num_rows < (batch_size if drop_last else 1):
            raise UserError(
                f"the training data has {num_rows} prompts, fewer than one batch of {batch_size}: "
                "lower data.train_batch_size or give more data"
            )
        self.num_rows, self.batch_size, self.seed = num_rows, batch_size, seed
        self.epoch_length = num_rows  # rows that an epoch goes through
        self.shuffle, self.drop_last = shuffle, drop_last
        self.epoch = 0
        self.position = 0  # rows of this epoch that were drawn
        self._cached: tuple[int, np.ndarray] | None = None

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(self.epoch_length, self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def order(self, epoch: int) -> np.ndarray:
        """The row numbers [num_rows] in the order of this epoch."""
        if self._cached is None or self._cached[0] != epoch:
            rows = shuffled(self.num_rows, self.seed, epoch) if self.shuffle else np.arange(self.num_rows)
            self._cached = (epoch, rows)
        return self._cached[1]

    def next_batch(self) -> list[int]:
        """The batch after the last one; starts the next epoch when this one has no batch left."""
        left = self.num_rows - self.position
        if left < (self.batch_size if self.drop_last else 1):
            self.epoch, self.position = self.epoch + 1, 0
        rows = self.order(self.epoch)[self.position : self.position + self.batch_size].tolist()
        self.position += len(rows)
        return rows

    def update(self, outcomes: Batch) -> dict[str, float]:
        """Learn from the graded samples of a step (`valor.data.curriculum.outcomes`); returns metrics."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, of a sampler of the same rows, seed and shuffling."""
        self._check(state)
        self.epoch, self.position = state["epoch"], state["position"]

    def _check(self, state: Mapping[str, Any]) -> None:
        if state.keys() != self.state_dict().keys():
            raise UserError("the checkpoint is of a run with another data.sampler: set it as there, or begin anew")
