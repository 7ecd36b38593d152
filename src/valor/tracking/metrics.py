"""The numbers of a step: how they add up over micro-batches and ranks, how they are spread, how long phases took."""

import math
import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_BINS = 32
EXTREME = re.compile(r"[_/](max|min)$")


def reduce_metrics(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sum of each key over the dicts; a key ending in `_max`/`/max` (`_min`/`/min`) takes the largest (smallest).

    Losses and their metrics are divided by global denominators before they arrive here, hence the sum.
    A dict without some key adds nothing to it. NaN wins over every number, so that it is never hidden.
    """
    reduced: dict[str, float] = {}
    for key, value in (item for record in metrics for item in record.items()):
        extreme = EXTREME.search(key)
        join = operator.add if extreme is None else np.maximum if extreme[1] == "max" else np.minimum
        reduced[key] = float(join(reduced[key], float(value))) if key in reduced else float(value)
    return reduced


def summarize(name: str, array: Any, mask: Any = None) -> dict[str, float]:
    """`{name/mean, name/max, name/min}` of the entries where `mask` (same shape, 0/1) is set; `{}` if there is none.

    `array` is a torch tensor on any device and of any dtype, a NumPy array or a sequence.
    """
    chosen = _selected(array, mask)
    return {f"{name}/{kind}": float(getattr(chosen, kind)()) for kind in ("mean", "max", "min") if chosen.size}


def explained_variance(values: Any, returns: Any, mask: Any) -> float:
    """1 − Var(returns − values) / Var(returns) over the entries with mask 1; NaN where the returns do not vary.

    values, returns, mask: [B, T] of a whole batch. Population variances from sums. (verl adds 1e-5 to the denominator,
    which turns constant returns into a large negative number instead of NaN.)
    """
    target = _selected(returns, mask)
    error = target - _selected(values, mask)
    if target.size < 2:
        return math.nan
    mean_square = (target**2).sum() / target.size
    spread = mean_square - (target.sum() / target.size) ** 2
    if spread <= 1e-12 * max(mean_square, 1e-30):  # what rounding leaves of a variance of zero
        return math.nan
    unexplained = (error**2).sum() / error.size - (error.sum() / error.size) ** 2
    return float(1.0 - unexplained / spread)


def explained_variance_by_group(values: Any, returns: Any, mask: Any, groups: Sequence[int]) -> tuple[float, float]:
    """Explained variance within and between the groups of rows with one number in `groups` [B].

    Within: 1 − Σ (e − ē_g)² / Σ (R − R̄_g)² of errors e = R − V, over the entries with mask 1, ē_g and R̄_g the means of
    an entry's group. Between: the same of ē_g − ē and R̄_g − R̄. The explained variance of all is the mean of both,
    weighted by the parts of Σ (R − R̄)² that lie within and between. NaN where there is nothing to explain.
    """
    chosen = _to_numpy(mask) > 0
    if not chosen.any():
        return math.nan, math.nan
    group = np.broadcast_to(np.asarray(groups)[:, None], chosen.shape)[chosen]
    target = _selected(returns, mask)
    error = target - _selected(values, mask)
    sizes = np.maximum(np.bincount(group), 1)

    def parts(x: np.ndarray) -> tuple[float, float]:
        of_group = (np.bincount(group, x) / sizes)[group]
        return float(((x - of_group) ** 2).sum()), float(((of_group - x.mean()) ** 2).sum())

    rounding = 1e-12 * max(float((target**2).sum()), 1e-30)
    within, between = (
        1.0 - unexplained / spread if spread > rounding else math.nan
        for unexplained, spread in zip(parts(error), parts(target), strict=True)
    )
    return within, between


@dataclass(frozen=True)
class Histogram:
    """`counts[i]` entries lie in the i-th of len(counts) equal bins between `low` and `high`."""

    low: float
    high: float
    counts: list[int]

    @property
    def edges(self) -> np.ndarray:
        return np.linspace(self.low, self.high, len(self.counts) + 1)


def histogram(array: Any, mask: Any, bins: int = NUM_BINS) -> Histogram | None:
    """Of the finite entries of `array` where `mask` (same shape, 0/1) is set; None if there is none.

    Torch tensors or NumPy arrays. Entries that are all equal lie in one bin without width.
    """
    chosen = _selected(array, mask)
    chosen = chosen[np.isfinite(chosen)]
    if chosen.size == 0:
        return None
    if chosen.min() == chosen.max():
        return Histogram(float(chosen[0]), float(chosen[0]), [chosen.size])
    counts, edges = np.histogram(chosen, bins=bins)
    return Histogram(float(edges[0]), float(edges[-1]), counts.tolist())


class Timer:
    """Seconds per phase of one step: `with timer("gen"): ...`, then `timer.metrics()` gives `timing_s/gen`.

    A phase entered twice adds up; `began` is when it was entered first, in seconds after the timer was made. Phases
    nest only inside "step", the training step; those of different threads may overlap.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._made = clock()
        self.seconds: dict[str, float] = {}
        self.began: dict[str, float] = {}
        self._spans: list[tuple[float, float, str]] = []  # begin, end, phase

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the block; the seconds count also when it raises."""
        began = self._clock()
        self.began.setdefault(phase, began - self._made)
        try:
            yield
        finally:
            ended = self._clock()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + ended - began
            self._spans.append((began, ended, phase))

    @property
    def hidden(self) -> dict[str, float]:
        """Seconds of each phase that overlap an earlier phase: nobody waited for them."""
        overlaps: dict[str, float] = {}
        reached = -math.inf
        for began, ended, phase in sorted(span for span in self._spans if span[2] != "step"):
            if reached > began:
                overlaps[phase] = overlaps.get(phase, 0.0) + min(ended, reached) - began
            reached = max(reached, ended)
        return overlaps

    def metrics(self, tokens: Mapping[str, int] | None = None) -> dict[str, float]:
        """`timing_s/<phase>`, `timing_began_s/<phase>`, `timing_hidden_s/<phase>` where there are such, and
        `timing_per_token_ms/<phase>` with a token count."""
        metrics = {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}
        metrics |= {f"timing_hidden_s/{phase}": seconds for phase, seconds in self.hidden.items()}
        metrics |= {f"timing_began_s/{phase}": at for phase, at in self.began.items() if phase != "step"}
        for phase, count in (tokens or {}).items():
            if phase in self.seconds and count > 0:
                metrics[f"timing_per_token_ms/{phase}"] = self.seconds[phase] * 1e3 / count
        return metrics


def _selected(array: Any, mask: Any) -> np.ndarray:
    """float64 entries of `array` where `mask` is set, flat; ValueError if the shapes differ."""
    numbers = _to_numpy(array)
    if mask is not None:
        chosen = _to_numpy(mask) > 0
        if chosen.shape != numbers.shape:
            raise ValueError(f"mask {chosen.shape} and array {numbers.shape} differ in shape")
        numbers = numbers[chosen]
    return numbers.reshape(-1).astype(np.float64, copy=False)


def _to_numpy(array: Any) -> np.ndarray:
    if hasattr(array, "detach"):  # a torch tensor: it may need a gradient, be on a device, or be bfloat16
        array = array.detach().cpu()
        array = (array.float() if array.dtype.itemsize < 4 and array.is_floating_point() else array).numpy()
    return np.asarray(array)
