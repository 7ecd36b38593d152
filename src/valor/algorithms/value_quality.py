"""How good values are, judged against what happened afterwards: pure functions of flat tensors."""

import math

import torch
from scipy import stats
from torch import Tensor


def auc(values: Tensor, right: Tensor) -> float:
    """P(V of a right one > V of a wrong one) + ½ P(equal), over all pairs: the area under the ROC curve.

    values [N], right [N] (bool). A constant critic has exactly ½. NaN when all are right or all are wrong.
    """
    positive = right.bool()
    first, second = int(positive.sum()), int((~positive).sum())
    if not first or not second:
        return math.nan
    ranks = stats.rankdata(values.double())[positive]  # from 1; equal values share their mean rank
    return float((ranks.sum() - first * (first + 1) / 2) / (first * second))


def calibration(values: Tensor, outcomes: Tensor, bins: int = 10) -> list[dict[str, float]]:
    """Equally full bins of rising value, each with its `count`, mean `value` and mean `outcome`.

    values, outcomes [N]. Equal values are never parted, so there may be fewer bins than asked. Equal
    counts instead of equal widths: values need not lie in [0, 1], and no bin is empty.
    """
    v, order = values.double().sort(stable=True)
    y = outcomes.double()[order]
    cuts = torch.tensor([round(len(v) * (i + 1) / bins) for i in range(bins)])
    ends = torch.searchsorted(v, v[cuts[cuts > 0] - 1], right=True).unique()
    parts = zip(v.tensor_split(ends[:-1]), y.tensor_split(ends[:-1]), strict=True)
    return [
        {"count": len(some), "value": float(some.mean()), "outcome": float(outcome.mean())} for some, outcome in parts
    ]


def calibration_error(bins: list[dict[str, float]]) -> float:
    """Σ_b n_b / N · |mean value − mean outcome| (expected calibration error, https://arxiv.org/abs/1706.04599)."""
    return sum(b["count"] * abs(b["value"] - b["outcome"]) for b in bins) / sum(b["count"] for b in bins)


def pearson(x: Tensor, y: Tensor) -> float:
    """Correlation of x and y [N]; NaN where either does not vary."""
    if len(x) < 2 or x.double().std() == 0 or y.double().std() == 0:
        return math.nan
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])


def pair_agreement(values: Tensor, truth: Tensor) -> float:
    """Among the pairs that `truth` orders, the share that V orders in the same way; pairs equal in V count half.

    values, truth [N] of one response. ½ is chance, 1 the same order (Kendall's concordance). NaN where truth is flat.
    """
    difference = truth.double()[:, None] - truth.double()
    ordered = difference > 0
    if not ordered.any():
        return math.nan
    gap = (values.double()[:, None] - values.double())[ordered]
    return float(((gap > 0).double() + 0.5 * (gap == 0).double()).mean())


def noise_ceiling(estimates: Tensor) -> float:
    """Highest correlation with the mean of K noisy samples that the true mean itself can have.

    estimates [N, K]: K independent samples of each of N quantities. √(1 − mean(s²)/K ÷ var(sample means)): the square
    root of the means' reliability (Spearman 1904); 0 where the means vary no more than noise does, NaN for K < 2 or
    means that do not vary.
    """
    k = estimates.shape[1]
    means = estimates.double().mean(1)
    total = float(means.var()) if len(means) > 1 else 0.0
    if k < 2 or total <= 0:
        return math.nan
    noise = float(estimates.double().var(1).mean()) / k
    return math.sqrt(max(0.0, 1.0 - noise / total))


def advantage_quality(estimates: Tensor, before: Tensor, after: Tensor) -> list[tuple[float, float]]:
    """Of each of L ways to estimate advantages: the slope of estimates on the true advantages (1: differences arrive in
    full, on average), and their correlation.

    estimates [L, N]; before, after [N, K]: K ≥ 2 independent samples of the values whose difference is the true
    advantage, V(s) and Q(s, a). Their noise is taken out of the variance of the truth, which is at least what estimates
    explain of it. NaN where it leaves nothing.
    """
    truth = (after.double() - before.double()).mean(1)
    if len(truth) < 2 or before.shape[1] < 2:
        return [(math.nan, math.nan)] * len(estimates)
    noise = float((before.double().var(1) + after.double().var(1)).mean()) / before.shape[1]
    covariances = torch.cov(torch.cat([estimates.double(), truth[None]]))
    shared, spread, variance = covariances[-1, :-1], covariances.diag()[:-1], float(covariances[-1, -1]) - noise
    if variance <= 0:
        return [(math.nan, math.nan)] * len(estimates)
    variance = max(variance, float((shared.square() / spread).nan_to_num(0.0).max()))
    correlations = (shared / (spread * variance).sqrt()).clamp(-1.0, 1.0)
    return [*zip((shared / variance).tolist(), correlations.tolist(), strict=True)]
