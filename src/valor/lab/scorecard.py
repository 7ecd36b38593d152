"""The scorecard of a critic as numbers: values against what happened afterwards. No model, no file."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from valor.algorithms.gae import token_gae
from valor.algorithms.reward_shaping import place_at_end, value_at_end
from valor.algorithms.value_quality import (
    advantage_quality,
    auc,
    calibration,
    calibration_error,
    noise_ceiling,
    pair_agreement,
    pearson,
)
from valor.lab.statistics import bootstrap_interval, sign_flip_p
from valor.tracking.metrics import explained_variance, explained_variance_by_group

PLACES = 11  # relative positions: 0, 0.1, …, 1
_RESAMPLES = 1000
_LAMBDAS = (0.0, 0.5, 0.7, 0.9, 0.95, 1.0)


@dataclass(frozen=True)
class Judged:
    """Responses with their values: values, returns and mask [B, T], right [B] (bool), prompts: whose answer each is."""

    values: Tensor
    returns: Tensor
    mask: Tensor
    right: Tensor
    prompts: Sequence[int]


@dataclass(frozen=True)
class Branches:
    """Monte-Carlo truth: returns [n, K] of K rollouts from the state before token `tokens` [n] of row `rows` [n], and
    from the state behind it (`after`), discounted."""

    rows: Tensor
    tokens: Tensor
    returns: Tensor
    after: Tensor


def scorecard(judged: Judged, branches: Branches | None = None, gamma: float = 1.0) -> dict[str, Any]:
    """All numbers as JSON values (None where one does not exist, such as the AUC when every answer is right).

    A response's verdict is the value at its last policy token, the state in which all but that token is written.
    """
    places = _relative_places(judged.mask)
    along, returns_along = judged.values.gather(1, places), judged.returns.gather(1, places)
    last = along[:, -1]
    within, between = explained_variance_by_group(judged.values, judged.returns, judged.mask, judged.prompts)
    return {
        "responses": len(last),
        "prompts": len(set(judged.prompts)),
        "right": float(judged.right.double().mean()),
        "auc": _with_interval(lambda rows: auc(last[rows], judged.right[rows]), judged.prompts),
        "explained_variance": _finite(explained_variance(judged.values, judged.returns, judged.mask)),
        "explained_variance_within": _finite(within),
        "explained_variance_between": _finite(between),
        "calibration": {
            "last": _calibration(last, returns_along[:, -1]),
            "all": _calibration(along.flatten(), returns_along.flatten()),
        },
        "positions": [
            {"at": round(q / (PLACES - 1), 2), **_at(along[:, q], returns_along[:, q], judged.right)}
            for q in range(PLACES)
        ],
        "turns": _by_turn(judged),
        "monte_carlo": None if branches is None else _monte_carlo(judged, branches, gamma),
    }


def _at(values: Tensor, returns: Tensor, right: Tensor) -> dict[str, Any]:
    """One value of each response: how it tells right from wrong, and the mean and quartiles of either."""
    fit = explained_variance(values, returns, torch.ones_like(values))
    sides = {"right": values[right], "wrong": values[~right]}
    return {"auc": _finite(auc(values, right)), "explained_variance": _finite(fit)} | {
        name: _spread(side.double()) if len(side) else None for name, side in sides.items()
    }


def _spread(values: Tensor) -> dict[str, float]:
    """Quartiles, mean and number."""
    ends = {"low": float(values.quantile(0.25)), "high": float(values.quantile(0.75))}
    return {**ends, "mean": float(values.mean()), "count": len(values)}


def _relative_places(mask: Tensor) -> Tensor:
    """[B, PLACES] the policy token at each relative position of its response: the first at 0, the last at 1."""
    rows = []
    for row in mask:
        tokens = row.nonzero().squeeze(1)
        at = torch.linspace(0, len(tokens) - 1, PLACES, dtype=torch.float64).round().long()
        rows.append(tokens[at])
    return torch.stack(rows)


def _by_turn(judged: Judged) -> list[dict[str, Any]]:
    """The same at the last token of each turn (a run of policy tokens), over the responses that have the turn."""
    mask = judged.mask > 0
    ends = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)
    turn = ends.cumsum(1) * ends  # at a turn's last token its number
    out = []
    for number in range(1, int(turn.max()) + 1):
        rows, tokens = (turn == number).nonzero(as_tuple=True)
        numbers = _at(judged.values[rows, tokens], judged.returns[rows, tokens], judged.right[rows])
        out.append({"turn": number, "responses": len(rows), **numbers})
    return out


def _calibration(values: Tensor, returns: Tensor) -> dict[str, Any]:
    bins = calibration(values, returns)
    return {"ece": calibration_error(bins), "bins": bins}


def _monte_carlo(judged: Judged, branches: Branches, gamma: float) -> dict[str, Any]:
    """Values against branch means, over all points and, by order alone, within each response."""
    values = judged.values[branches.rows, branches.tokens].double()
    truth = branches.returns.double().mean(1)
    points = [branches.rows == row for row in branches.rows.unique()]
    agreements = [pair_agreement(values[of_row], truth[of_row]) for of_row in points]
    # A response whose states are all worth the same says nothing about their order.
    agreements = [share for share in agreements if not math.isnan(share)]
    low, high = bootstrap_interval(agreements) or (None, None)
    ceiling, correlation = noise_ceiling(branches.returns), pearson(values, truth)
    return {
        "branches": branches.returns.shape[1],
        "points": len(values),
        "responses": len(points),
        "correlation": _finite(correlation),
        "noise_ceiling": _finite(ceiling),
        "abs_error": float((values - truth).abs().mean()),
        "bias": float((values - truth).mean()),
        "agreement": {
            "responses": len(agreements),
            "mean": math.fsum(agreements) / len(agreements) if agreements else None,
            "low": low,
            "high": high,
            "p": sign_flip_p([share - 0.5 for share in agreements]) if agreements else None,
        },
        "lambdas": _by_lambda(judged, branches, gamma),
        "scatter": {"value": values.tolist(), "truth": truth.tolist()},
    }


def _by_lambda(judged: Judged, branches: Branches, gamma: float) -> list[dict[str, float | None]]:
    """How well each λ's advantages tell the true ones: `slope` and `correlation` of `advantage_quality`."""
    rewards = place_at_end(value_at_end(judged.returns, judged.mask), judged.mask)
    by_lambda = [token_gae(rewards, judged.values, judged.mask, gamma, (lam, lam))[0] for lam in _LAMBDAS]
    estimates = torch.stack(by_lambda)[:, branches.rows, branches.tokens]
    qualities = zip(_LAMBDAS, advantage_quality(estimates, branches.returns, branches.after), strict=True)
    return [{"lam": lam, "slope": _finite(slope), "correlation": _finite(r)} for lam, (slope, r) in qualities]


def _with_interval(statistic: Callable[[Tensor], float], prompts: Sequence[int]) -> dict[str, float | None]:
    """A statistic of rows with its 95 % interval: percentile bootstrap over prompts, whose answers go together."""
    _, number = np.unique(prompts, return_inverse=True)
    groups = [torch.from_numpy(np.flatnonzero(number == i)) for i in range(number.max() + 1)]
    rng = np.random.default_rng(0)
    draws = (rng.integers(len(groups), size=len(groups)) for _ in range(_RESAMPLES if len(groups) > 1 else 0))
    statistics = [statistic(torch.cat([groups[i] for i in draw])) for draw in draws]
    statistics = [value for value in statistics if not math.isnan(value)]
    low, high = np.quantile(statistics, [0.025, 0.975]).tolist() if statistics else (None, None)
    return {"value": _finite(statistic(torch.arange(len(number)))), "low": low, "high": high}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
