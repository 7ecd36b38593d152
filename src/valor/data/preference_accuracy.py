"""Is a reward model any good? Accuracy over all pairs and by source, and whether it merely measures length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def preference_accuracy(
    chosen: Sequence[float],
    rejected: Sequence[float],
    sources: Sequence[str],
    chosen_lengths: Sequence[int],
    rejected_lengths: Sequence[int],
) -> dict[str, Any]:
    """What the scores [B] of the better and the worse response of each pair say; lengths in characters.

    A pair counts 1 where the better one scores higher, 1/2 where both score the same. `length` compares with taking the
    longer response: `longer_is_better` is that rule's accuracy; accuracy where the better one is the shorter and where
    it is the longer; the correlation of score with length over all responses, and of the difference in score with the
    difference in length within pairs (None without variance).
    """
    better, worse = np.asarray(chosen, dtype=np.float64), np.asarray(rejected, dtype=np.float64)
    right = (better > worse) + 0.5 * (better == worse)
    first, second = np.asarray(chosen_lengths), np.asarray(rejected_lengths)
    names = np.asarray(sources)
    lengths = {
        "longer_is_better": _mean((first > second) + 0.5 * (first == second)),
        "chosen_shorter": _group(right, first < second),
        "chosen_longer": _group(right, first > second),
        "score_correlation": _correlation(np.r_[better, worse], np.r_[first, second]),
        "difference_correlation": _correlation(better - worse, first - second),
    }
    return {
        **_group(right, np.ones(len(right), dtype=bool)),
        "mean_margin": _mean(better - worse),
        "by_source": {str(name): _group(right, names == name) for name in sorted(set(sources))},
        "length": lengths,
    }


def as_metrics(found: dict[str, Any]) -> dict[str, float]:
    """The findings as metrics; what could not be measured is left out."""
    length = found["length"]
    named = {
        "accuracy": found["accuracy"],
        "margin": found["mean_margin"],
        **{f"accuracy/{name}": group["accuracy"] for name, group in found["by_source"].items()},
        "length/accuracy_chosen_shorter": length["chosen_shorter"]["accuracy"],
        "length/accuracy_chosen_longer": length["chosen_longer"]["accuracy"],
        "length/score_correlation": length["score_correlation"],
        "length/difference_correlation": length["difference_correlation"],
    }
    return {name: value for name, value in named.items() if value is not None}


def _group(right: np.ndarray, members: np.ndarray) -> dict[str, Any]:
    return {"pairs": int(members.sum()), "accuracy": _mean(right[members])}


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    return float(np.corrcoef(a, b)[0, 1]) if len(a) > 1 and a.std() > 0 and b.std() > 0 else None
