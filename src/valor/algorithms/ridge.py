"""Ridge regression from sums over samples: exact, in float64, and refitted as samples arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGES: tuple[float, ...] = tuple(10.0**k for k in range(-6, 3))
_CONSTANT = 1e-10  # share of a feature's mean square below which its variance is rounding
_MEMORY_OF_ERRORS = 0.8  # weight of the errors of earlier steps in the choice of the ridge
_SPREAD = 2.0  # standard deviations of fitted values that a prediction may be away from their mean
_FIRST = len(RIDGES) - 1  # the choice before any prediction has been judged: the most careful one


def moments(features: Tensor, targets: Tensor) -> Tensor:
    """ZᵀZ [D + 2, D + 2] in float64 of Z = [1, x, y], x [N, D] and y [N]: all that a linear regression needs of them.

    Those of several sets of samples add up; a factor weighs a set.
    """
    y = targets.double()[:, None]
    z = torch.cat([torch.ones_like(y), features.double(), y], dim=1)
    return z.T @ z


def mean_and_covariance(sums: Tensor) -> tuple[Tensor, Tensor]:
    """[D + 1], [D + 1, D + 1] of [x, y], from `moments`."""
    mean = sums[0, 1:] / sums[0, 0]
    return mean, sums[1:, 1:] / sums[0, 0] - torch.outer(mean, mean)


def ridge_regression(sums: Tensor, ridges: Sequence[float] = RIDGES) -> Tensor:
    """[R, D + 1] intercept and weights for each ridge r, float64, from `moments` of n samples.

    They minimise 1/n Σ (y − a − w·x)² + r Σ_d (s_d w_d)², with s_d the standard deviation of feature d: the same ridge
    is right whatever the features' units. Features that do not vary have weight 0.
    """
    mean, covariance = mean_and_covariance(sums)
    variance, target = covariance.diagonal()[:-1], covariance[:-1, -1]
    varies = variance > _CONSTANT * (variance + mean[:-1].square())
    scale = torch.where(varies, variance, 1.0).rsqrt() * varies
    correlation, eye = scale[:, None] * covariance[:-1, :-1] * scale, torch.eye(len(scale)).to(sums)
    rows = []
    for ridge in ridges:
        factor = torch.linalg.cholesky(correlation + ridge * eye)
        weights = scale * torch.cholesky_solve((scale * target)[:, None], factor)[:, 0]
        rows.append(torch.cat([(mean[-1] - weights @ mean[:-1])[None], weights]))
    return torch.stack(rows)


@dataclass(frozen=True)
class Evidence:
    """What a set of samples says: their `moments`, the summed squared errors [R] of the predictions made before, and
    the least and largest target, [1] each (inf, -inf: there are no samples)."""

    moments: Tensor
    errors: Tensor
    low: Tensor
    high: Tensor

    @staticmethod
    def total(parts: Sequence[Evidence]) -> Evidence:
        """That of all sets together, added up in their order."""
        moments, errors = parts[0].moments, parts[0].errors
        for part in parts[1:]:
            moments, errors = moments + part.moments, errors + part.errors
        low, high = torch.cat([part.low for part in parts]), torch.cat([part.high for part in parts])
        return Evidence(moments, errors, low.amin(0, keepdim=True), high.amax(0, keepdim=True))


class OnlineRidge:
    """Predicts targets of a step from those of the steps before.

    `forgetting` weighs all that was seen before a step, in the next one. Fits for all `RIDGES` predict; the one counts
    that has erred least so far, recent steps more. Predictions are kept within the range of the targets seen, and
    within `_SPREAD` standard deviations of the fitted values from their mean: noise of the targets is no reason to
    believe in an extrapolation. They are 0 before there are any targets. `state`: sums, weights, errors, low, high, as
    tensors; empty before the first step.
    """

    def __init__(self, forgetting: float) -> None:
        self.forgetting = forgetting
        self.state: dict[str, Tensor] = {}

    @property
    def chosen(self) -> int:
        """Number of the ridge whose predictions count."""
        errors = self.state.get("errors")
        return _FIRST if errors is None or not errors.any() else int(errors.argmin())

    def predict(self, features: Tensor) -> Tensor:
        """[...] float64, of features [..., D]."""
        return self._predict(features, slice(self.chosen, self.chosen + 1)).squeeze(-1)

    def evidence(self, features: Tensor, targets: Tensor) -> Evidence:
        """Of samples x [N, D], y [N], whose targets the present fit does not know."""
        y, none = targets.double(), targets.new_full((1,), torch.inf, dtype=torch.float64)
        low, high = torch.cat([y, none]).amin(0, keepdim=True), torch.cat([y, -none]).amax(0, keepdim=True)
        errors = (self._predict(features, slice(None)) - y[:, None]).square().sum(0)
        return Evidence(moments(features, y), errors, low, high)

    def learn(self, seen: Evidence) -> dict[str, float]:
        """Refit with a step's evidence. Returns `vf_loss` (½ the mean squared error of the predictions), `ridge`, and
        `skipped`: 1 where numbers are not finite, and nothing is changed; nor is it where there are no samples."""
        count = float(seen.moments[0, 0])
        mean = seen.errors / max(count, 1.0)
        metrics = {"vf_loss": 0.5 * float(mean[self.chosen]), "ridge": RIDGES[self.chosen], "skipped": 0.0}
        if not bool(seen.moments.isfinite().all()):
            return metrics | {"skipped": 1.0}
        if count:
            old = self.state or {"sums": torch.zeros_like(seen.moments), "low": seen.low, "high": seen.high}
            sums = self.forgetting * old["sums"] + seen.moments
            errors = _MEMORY_OF_ERRORS * old["errors"] + mean if "errors" in old else torch.zeros_like(mean)
            low, high = torch.minimum(old["low"], seen.low), torch.maximum(old["high"], seen.high)
            self.state = {"sums": sums, "weights": ridge_regression(sums), "errors": errors, "low": low, "high": high}
        return metrics

    def _predict(self, features: Tensor, which: slice) -> Tensor:
        if not self.state:
            return features.new_zeros(*features.shape[:-1], len(RIDGES[which]), dtype=torch.float64)
        weights, (mean, covariance) = self.state["weights"][which], mean_and_covariance(self.state["sums"])
        slopes = weights[:, 1:]
        reach = _SPREAD * ((slopes @ covariance[:-1, :-1]) * slopes).sum(1).clamp(min=0.0).sqrt()
        low, high = (mean[-1] - reach).clamp(min=self.state["low"]), (mean[-1] + reach).clamp(max=self.state["high"])
        return (weights[:, 0] + features.double() @ slopes.T).maximum(low).minimum(high)
