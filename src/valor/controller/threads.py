"""How many CPU threads each process of a run takes."""

import math
import os
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from valor.config import RunConfig
from valor.tracking.rundir import read_run_info

_SIZES = ((8, 576, 576), (64, 576, 1536))  # rows, inputs, outputs: a decoding step of a small model, and a batch of it
_REPEATS = 4
_PATIENCE = 3  # times the seconds that one thread takes
_WORTH_IT = 0.9  # of the time that all threads take


def threads_for(trainer: RunConfig, most: int, *, measure: bool) -> tuple[int, str]:
    """trainer.num_threads, else OMP_NUM_THREADS, else those of the run that goes on here, else at most `most`:
    as many as are quickest now where it is to `measure`. A run's numbers depend on its threads, in the last bits.

    Also why fewer than `most` were chosen, for the user; "" where they were not chosen here.
    """
    variable = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if trainer.num_threads is not None or variable.isdigit():
        return trainer.num_threads or max(1, int(variable)), ""
    if not measure or most == 1:
        return most, ""
    before = read_run_info(Path(trainer.default_local_dir)).get("threads") if trainer.resume_mode == "auto" else None
    return (min(before, most), "") if isinstance(before, int) else _quickest(most)


@cache
def _quickest(most: int) -> tuple[int, str]:
    """1, half of `most`, or `most` threads, and why it is not all of them; measured once."""
    generator = torch.Generator().manual_seed(0)  # not the run's
    factors = [[torch.rand(size, generator=generator) for size in ((n, k), (k, m))] for n, k, m in _SIZES]
    before = torch.get_num_threads()
    try:
        alone = _seconds(1, factors, math.inf)
        seconds = {count: _seconds(count, factors, _PATIENCE * alone) for count in {most, most // 2} - {0, 1}}
    finally:
        torch.set_num_threads(before)
    seconds[1] = alone
    best = min(seconds, key=seconds.__getitem__)
    if seconds[best] > _WORTH_IT * seconds[most]:
        return most, ""
    slower = f"{seconds[most] / seconds[best]:.1f}" if math.isfinite(seconds[most]) else f"more than {_PATIENCE}"
    return best, (
        f"threads: {best} of {most}: all take {slower} times as long now, as other work has the cores "
        f"(trainer.num_threads={most} takes them nevertheless)"
    )


def _seconds(count: int, factors: Sequence[Sequence[torch.Tensor]], limit: float) -> float:
    """Of some products by this many threads; infinite where it is more than the limit."""
    torch.set_num_threads(count)
    torch.mm(*factors[0])  # starts the threads
    began = time.perf_counter()
    for left, right in [*factors] * _REPEATS:
        torch.mm(left, right).sin_()
        if time.perf_counter() - began > limit:
            return math.inf
    return time.perf_counter() - began
