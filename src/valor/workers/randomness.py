"""Random generators that are a function of a key alone, so that a resumed run draws what the undisturbed one drew."""

from __future__ import annotations

import numpy as np
import torch


def keyed_generator(*key: int) -> torch.Generator:
    """A CPU generator seeded by non-negative integers, such as (run seed, step, what it is for)."""
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed >> 1)  # torch takes a signed number
