"""Monte-Carlo ground truth for values: rollouts that branch off some responses and are played to the end."""

from __future__ import annotations

import torch

from valor.collector.branches import BRANCH_STREAM, branch_returns
from valor.collector.collector import Collector
from valor.data.batch import Batch
from valor.data.sampler import subset
from valor.lab.scorecard import Branches
from valor.report.run_data import evenly_spaced

_CHOICE_STREAM = 4  # last word of a random key


def draw_branches(
    collector: Collector, rollouts: Batch, *, responses: int, positions: int, branches: int, gamma: float
) -> Branches:
    """`branches` rollouts from each of `positions` states (first token to last, evenly spaced) of some responses."""
    chosen = subset(len(rollouts), responses, collector.config.trainer.seed, 0, _CHOICE_STREAM)
    lengths = rollouts["response_lengths"]
    points = [(row, token) for row in chosen for token in evenly_spaced(range(int(lengths[row])), positions)]
    returns, _ = branch_returns(collector, rollouts, points, branches, gamma, BRANCH_STREAM)
    rows, tokens = (torch.tensor(column) for column in zip(*points, strict=True))
    return Branches(rows, tokens, returns)
