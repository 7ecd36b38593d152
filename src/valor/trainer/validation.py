"""Validation metrics: mean@n, unbiased pass@k and majority vote, per data source."""

from collections import Counter
from collections.abc import Sequence
from math import comb

from valor.data.balance import grouped
from valor.tracking.console import validation_scores


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


def validation_metrics(
    uids: Sequence[str],
    data_sources: Sequence[str],
    scores: Sequence[float],
    correct: Sequence[bool],
    answers: Sequence[str | None],
) -> dict[str, float]:
    """`val-core/<source>/reward/<metric>`: the means over prompts of `prompt_metrics`."""
    by_source = prompt_metrics(uids, data_sources, scores, correct, answers)
    return {
        f"val-core/{source}/reward/{name}": _mean(values)
        for source, metrics in by_source.items()
        for name, values in metrics.items()
    }


def prompt_metrics(
    uids: Sequence[str],
    data_sources: Sequence[str],
    scores: Sequence[float],
    correct: Sequence[bool],
    answers: Sequence[str | None],
) -> dict[str, dict[str, list[float]]]:
    """Metrics of each prompt from its samples, which share a uid, by data source.

    `correct` is the grader's verdict, `answers` what it took for the answer. `mean@n`, and for n > 1 `pass@k` (k = 2,
    4 … n) and, when graders report the answer they extracted, `maj@n`.
    """
    prompts = grouped(range(len(uids)), zip(data_sources, uids, strict=True))
    out: dict[str, dict[str, list[float]]] = {}
    for groups in grouped(prompts, [data_sources[rows[0]] for rows in prompts]):
        n = min(len(g) for g in groups)
        metrics = out[data_sources[groups[0][0]]] = {f"mean@{n}": [_mean([scores[i] for i in g]) for g in groups]}
        if n == 1:
            continue
        right = [sum(correct[i] for i in g) for g in groups]
        for k in (2**power for power in range(1, n.bit_length())):
            metrics[f"pass@{k}"] = [pass_at_k(len(g), c, k) for g, c in zip(groups, right, strict=True)]
        if any(answers[i] is not None for g in groups for i in g):
            metrics[f"maj@{n}"] = [majority_score([answers[i] for i in g], [scores[i] for i in g]) for g in groups]
    return out


def headline(metrics: dict[str, float]) -> float | None:
    """The one number that "best" means: the mean over data sources of mean@n."""
    means = list(validation_scores(metrics).values())
    return _mean(means) if means else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
