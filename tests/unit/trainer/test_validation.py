"""Validation metrics against hand-worked numbers and brute force."""

from itertools import combinations

import pytest

from valor.trainer.validation import headline, majority_score, pass_at_k, validation_metrics


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 1), (4, 2, 2), (6, 1, 3), (5, 0, 2), (5, 5, 5), (8, 3, 4)])
def test_pass_at_k_counts_subsets(n, c, k):
    outcomes = [1] * c + [0] * (n - c)
    subsets = list(combinations(outcomes, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_k_refuses_more_draws_than_samples():
    with pytest.raises(ValueError, match="k <= n"):
        pass_at_k(2, 1, 3)


def test_majority_counts_answers_not_scores():
    assert majority_score(["7", "8", "8", None], [1.0, 0.0, 0.0, 0.0]) == 0.0
    assert majority_score(["7", "7", "8", None], [1.0, 1.0, 0.0, 0.0]) == 1.0
    assert majority_score([None, None], [0.0, 0.0]) == 0.0


def test_metrics_are_means_over_prompts_of_each_source():
    metrics = validation_metrics(
        uids=["a", "a", "b", "b", "a", "a"],
        data_sources=["x", "x", "x", "x", "y", "y"],
        scores=[1.0, 0.0, 0.0, 0.0, 0.5, 0.5],
        correct=[True, False, False, False, True, True],
        answers=["1", "2", "3", "3", None, None],
    )
    assert metrics["val-core/x/reward/mean@2"] == pytest.approx(0.25)
    assert metrics["val-core/x/reward/pass@2"] == pytest.approx(0.5)
    assert metrics["val-core/x/reward/maj@2"] == pytest.approx(0.5)
    assert metrics["val-core/y/reward/mean@2"] == pytest.approx(0.5)
    assert metrics["val-core/y/reward/pass@2"] == 1.0
    assert "val-core/y/reward/maj@2" not in metrics  # its grader tells no answers, so nothing was voted on
    assert headline(metrics) == pytest.approx((0.25 + 0.5) / 2)
    assert headline({"actor/lr": 1.0}) is None
