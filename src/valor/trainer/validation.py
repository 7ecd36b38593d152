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
    """Score of the most frequent answer (ties: the one met first); samples without an answer do not vote."""
    votes = Counter(a for a in answers if a is not None)
    if not votes:
        return 0.0
    winner = votes.most_common(1)[0][0]
    return next(s for a, s in zip(answers, scores, strict=True) if a == winner)


def validation_metrics(
    uids: Sequence[str],
    data_sources: Sequence[str],
    scores: Sequence[float],
    correct: Sequence[bool],
    answers: Sequence[str | None],
) -> dict[str, float]:
    """Metrics of one validation pass over samples (several samples of a prompt share a uid).

    `correct` is the grader's verdict, `answers` what it took for the answer. For each data source:
    `val-core/<source>/reward/mean@n`, and for n > 1 `.../pass@k` (k = 2, 4 … n) and, when graders report the answer
    they extracted, `.../maj@n`.
    """
    prompts = grouped(range(len(uids)), zip(data_sources, uids, strict=True))
    out: dict[str, float] = {}
    for groups in grouped(prompts, [data_sources[rows[0]] for rows in prompts]):
        n = min(len(g) for g in groups)
        head = f"val-core/{data_sources[groups[0][0]]}/reward"
        out[f"{head}/mean@{n}"] = _mean([_mean([scores[i] for i in g]) for g in groups])
        if n == 1:
            continue
        right = [sum(correct[i] for i in g) for g in groups]
        for k in (2**power for power in range(1, n.bit_length())):
            out[f"{head}/pass@{k}"] = _mean([pass_at_k(len(g), c, k) for g, c in zip(groups, right, strict=True)])
        if any(answers[i] is not None for g in groups for i in g):
            votes = [majority_score([answers[i] for i in g], [scores[i] for i in g]) for g in groups]
            out[f"{head}/maj@{n}"] = _mean(votes)
    return out


def headline(metrics: dict[str, float]) -> float | None:
    """The one number that "best" means: the mean over data sources of mean@n."""
    means = list(validation_scores(metrics).values())
    return _mean(means) if means else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
