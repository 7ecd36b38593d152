"""Validation metrics: mean@n, unbiased pass@k and majority vote, per data source."""

from collections import Counter
from collections.abc import Sequence
from math import comb
from typing import NamedTuple

from valor.data.balance import grouped
from valor.tracking.console import validation_scores


class Graded(NamedTuple):
    """A sample: its prompt's uid, its score, the grader's verdict, and what that took for the answer."""

    uid: str
    data_source: str
    score: float
    correct: bool
    answer: str | None


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that k samples drawn without replacement hold a correct one: 1 − C(n−c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, eq. 1).
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@k needs 1 <= k <= n, got k={k}, n={num_samples}")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def majority_score(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """Score of the most frequent answer (ties: the one met first); samples without an answer (None, or the empty text
    that graders give) do not vote, and have their mean score where there are no others."""
    votes = Counter(a for a in answers if a not in (None, ""))
    if not votes:
        return _mean(scores)
    winner = votes.most_common(1)[0][0]
    return next(s for a, s in zip(answers, scores, strict=True) if a == winner)


def validation_metrics(samples: Sequence[Graded]) -> dict[str, float]:
    """`val-core/<source>/reward/<metric>`: the means over prompts of `prompt_metrics`."""
    return {
        f"val-core/{source}/reward/{name}": _mean(values)
        for source, metrics in prompt_metrics(samples).items()
        for name, values in metrics.items()
    }


def prompt_metrics(samples: Sequence[Graded]) -> dict[str, dict[str, list[float]]]:
    """Metrics of each prompt from its samples, by data source.

    `mean@n`, and for n > 1 `pass@k` (k = 2, 4 … n) and, when graders report the answer they extracted, `maj@n`.
    """
    prompts = grouped(samples, [(sample.data_source, sample.uid) for sample in samples])
    out: dict[str, dict[str, list[float]]] = {}
    for groups in grouped(prompts, [prompt[0].data_source for prompt in prompts]):
        n = min(len(g) for g in groups)
        metrics = out[groups[0][0].data_source] = {f"mean@{n}": [_mean([s.score for s in g]) for g in groups]}
        if n == 1:
            continue
        right = [sum(s.correct for s in g) for g in groups]
        for k in (2**power for power in range(1, n.bit_length())):
            metrics[f"pass@{k}"] = [pass_at_k(len(g), c, k) for g, c in zip(groups, right, strict=True)]
        if any(s.answer is not None for g in groups for s in g):
            metrics[f"maj@{n}"] = [majority_score([s.answer for s in g], [s.score for s in g]) for g in groups]
    return out


def headline(metrics: dict[str, float]) -> float | None:
    """The one number that "best" means: the mean over data sources of mean@n."""
    means = list(validation_scores(metrics).values())
    return _mean(means) if means else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
