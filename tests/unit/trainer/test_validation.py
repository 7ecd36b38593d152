"""Validation metrics against hand-worked numbers and brute force."""

from functools import partial
from itertools import combinations
from types import SimpleNamespace

import pytest

from valor.trainer.supervised import SFTRun
from valor.trainer.validation import Graded, headline, majority_score, pass_at_k, validation_metrics


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
    assert majority_score([None, ""], [-1.0, -1.0]) == -1.0  # graders like DAPO's: no answer is a wrong one
    assert majority_score(["", "", "7", ""], [0.0, 0.0, 1.0, 0.0]) == 1.0  # graders' "" is no answer
    assert majority_score([0, 0, 5], [1.0, 1.0, 0.0]) == 1.0


def test_metrics_are_means_over_prompts_of_each_source():
    samples = [
        *(Graded("a", "x", 1.0, True, "1"), Graded("a", "x", 0.0, False, "2")),
        *(Graded("b", "x", 0.0, False, "3"), Graded("b", "x", 0.0, False, "3")),
        *(Graded("a", "y", 0.5, True, None), Graded("a", "y", 0.5, True, None)),
    ]
    metrics = validation_metrics(samples)
    assert metrics["val-core/x/reward/mean@2"] == pytest.approx(0.25)
    assert metrics["val-core/x/reward/pass@2"] == pytest.approx(0.5)
    assert metrics["val-core/x/reward/maj@2"] == pytest.approx(0.5)
    assert metrics["val-core/y/reward/mean@2"] == pytest.approx(0.5)
    assert metrics["val-core/y/reward/pass@2"] == 1.0
    assert "val-core/y/reward/maj@2" not in metrics  # its grader tells no answers, so nothing was voted on
    assert headline(metrics) == pytest.approx((0.25 + 0.5) / 2)
    assert headline({"actor/lr": 1.0}) is None


@pytest.mark.parametrize("budget", [1, 40, 100, 10**6])
def test_one_long_sample_is_padding_in_its_own_batch_alone(budget):
    lengths = [5, 90, 7, 5, 30, 31, 6]

    class Samples:
        def __init__(self):
            self.lengths = lengths

        def batch(self, indices):
            self.asked = [*getattr(self, "asked", []), *indices]
            chosen = [lengths[i] for i in indices]
            assert len(chosen) == 1 or max(chosen) * len(chosen) <= 2 * budget
            return SimpleNamespace(meta={"num_tokens": float(sum(chosen))}, total=float(sum(n * n for n in chosen)))

    role = SimpleNamespace(evaluate=lambda batch: {"loss": batch.total / batch.meta["num_tokens"]})
    data = SimpleNamespace(max_token_len_per_gpu=budget)
    run = SimpleNamespace(config=SimpleNamespace(data=data), placement=SimpleNamespace(world_size=2))
    run.roles, run.role, samples = {"actor": role}, "actor", Samples()
    run.validation_batches = partial(SFTRun.validation_batches, run)
    loss = SFTRun.measure(run, samples)["loss"]
    assert loss == pytest.approx(sum(n * n for n in lengths) / sum(lengths)) and sorted(samples.asked) == [*range(7)]
    assert budget < 10**6 or (loss == sum(n * n for n in lengths) / sum(lengths) and samples.asked == [*range(7)])
