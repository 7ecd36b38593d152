"""How a quantity is spread over a step's tokens, as counts in bins of equal width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_BINS = 32


@dataclass(frozen=True)
class Histogram:
    """`counts[i]` entries lie in the i-th of len(counts) equal bins between `low` and `high`."""

    low: float
    high: float
    counts: list[int]

    @property
    def edges(self) -> np.ndarray:
        """The len(counts) + 1 bin edges."""
        return np.linspace(self.low, self.high, len(self.counts) + 1)

    @property
    def centres(self) -> np.ndarray:
        """The middles of the bins."""
        return (self.edges[:-1] + self.edges[1:]) / 2


def histogram(array: Any, mask: Any, bins: int = NUM_BINS) -> Histogram | None:
    """Of the finite entries of `array` where `mask` (same shape, 0/1) is set; None if there is none.

    Torch tensors or NumPy arrays. Entries that are all equal lie in the middle of a range of width 1.
    """
    chosen = np.asarray(array, dtype=np.float64)[np.asarray(mask) != 0]
    chosen = chosen[np.isfinite(chosen)]
    if chosen.size == 0:
        return None
    counts, edges = np.histogram(chosen, bins=bins)
    return Histogram(float(edges[0]), float(edges[-1]), counts.tolist())
