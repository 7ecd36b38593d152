"""Metric reduction, summaries, explained variance and timers, against numbers worked by hand."""

import math
import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from valor.tracking.metrics import Timer, explained_variance, explained_variance_by_group, reduce_metrics, summarize
from valor.trainer.step_metrics import mean_over_updates


def test_reduction_sums_except_extremes():
    reduced = reduce_metrics(
        [
            {"actor/pg_loss": 0.25, "ratio_max": 1.5, "ratio_min": 0.5, "critic/values/max": 2.0},
            {"actor/pg_loss": -1.0, "ratio_max": 1.25, "ratio_min": 0.75, "critic/values/max": 3.0},
            {"only_here": 4.0},
        ]
    )
    assert reduced == {
        "actor/pg_loss": -0.75,
        "ratio_max": 1.5,
        "ratio_min": 0.5,
        "critic/values/max": 3.0,
        "only_here": 4.0,
    }
    assert reduce_metrics([]) == {}


def test_updates_have_the_mean_of_what_both_give_and_extremes_as_extremes():
    found = mean_over_updates(
        [{"loss": 1.0, "ratio/max": 2.0, "kl_min": 0.5, "b": 4.0}, {"loss": 2.0, "ratio/max": 1.0}]
    )
    assert found == {"loss": 1.5, "ratio/max": 2.0, "kl_min": 0.5, "b": 4.0}


@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)])
@pytest.mark.parametrize("key", ["loss", "ratio_max", "ratio_min"])
def test_reduction_never_hides_nan(order, key):
    assert math.isnan(reduce_metrics([{key: value} for value in order])[key])


def test_a_name_that_only_contains_max_is_summed():
    assert reduce_metrics([{"max_tokens": 1.0, "actor/climax": 1.0}] * 3) == {"max_tokens": 3.0, "actor/climax": 3.0}


def test_summary_counts_masked_entries_only():
    values = torch.tensor([[1.0, 2.0, 99.0], [-3.0, -99.0, 4.0]], dtype=torch.bfloat16, requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    assert summarize("critic/values", values, mask) == {
        "critic/values/mean": 1.0,
        "critic/values/max": 4.0,
        "critic/values/min": -3.0,
    }
    assert summarize("response_length", [2, 4]) == {
        "response_length/mean": 3.0,
        "response_length/max": 4.0,
        "response_length/min": 2.0,
    }
    assert summarize("critic/values", values, torch.zeros(2, 3)) == {}
    with pytest.raises(ValueError, match="differ in shape"):
        summarize("critic/values", values, torch.ones(3, 2))


def test_explained_variance_by_hand():
    # returns 0, 0, 2, 2: variance 1. errors 0.5, -0.5, 0.5, -0.5: variance 0.25
    values, returns = np.array([[-0.5, 0.5, 1.5, 2.5]]), np.array([[0.0, 0.0, 2.0, 2.0]])
    assert explained_variance(values, returns, np.ones((1, 4))) == 0.75
    assert explained_variance(returns, returns, np.ones((1, 4))) == 1.0
    assert explained_variance(-values, returns, np.ones((1, 4))) < 0.0


def test_explained_variance_is_of_masked_in_entries_alone():
    rng = np.random.default_rng(7)
    returns = rng.normal(3.0, 2.0, (6, 5))
    values = returns + rng.normal(0.4, 0.5, (6, 5))
    mask = (rng.random((6, 5)) < 0.7).astype(np.float32)
    chosen = mask > 0
    expected = 1 - np.var((returns - values)[chosen]) / np.var(returns[chosen])
    assert explained_variance(values, returns, mask) == pytest.approx(expected, abs=1e-12)


def test_constant_returns_explain_nothing():
    constant = np.full((2, 3), 0.1)
    assert math.isnan(explained_variance(np.zeros((2, 3)), constant, np.ones((2, 3))))
    assert math.isnan(explained_variance(constant, constant, np.zeros((2, 3))))


def test_explained_variance_within_and_between_prompts_by_hand():
    """Two prompts of mean return 1 and 5; the values know both means, and have the samples the wrong way round."""
    returns = np.array([[0.0], [2.0], [4.0], [6.0]])
    values = np.array([[1.5], [0.5], [5.5], [4.5]])
    # Within: errors -1.5, 1.5, -1.5, 1.5 of returns -1, 1, -1, 1: 1 - 9 / 4. Between: no error of means, 1 - 0 / 16.
    assert explained_variance_by_group(values, returns, np.ones((4, 1)), [0, 0, 1, 1]) == (-1.25, 1.0)
    assert explained_variance(values, returns, np.ones((4, 1))) == pytest.approx((-1.25 * 4 + 1.0 * 16) / 20)
    one = explained_variance_by_group(values, returns, np.array([[1], [1], [0], [0]]), [0, 0, 1, 1])
    assert one[0] == -1.25 and math.isnan(one[1])


def test_the_parts_within_and_between_add_up_to_the_whole():
    rng = np.random.default_rng(3)
    groups = rng.integers(0, 4, 12)
    returns, mask = rng.normal(groups[:, None], 1.0, (12, 5)), rng.random((12, 5)) < 0.8
    values = returns * 0.5 + rng.normal(0.2, 0.7, (12, 5))
    within, between = explained_variance_by_group(values, returns, mask, groups.tolist())
    number = np.broadcast_to(groups[:, None], mask.shape)[mask]
    target = returns[mask]
    means = np.array([target[number == g].mean() for g in number])
    inside, outside = ((target - means) ** 2).sum(), ((means - target.mean()) ** 2).sum()
    whole = (within * inside + between * outside) / (inside + outside)
    assert whole == pytest.approx(explained_variance(values, returns, mask), abs=1e-12)


def test_timer_adds_up_and_survives_errors():
    now = iter([-1.0, 0.0, 1.5, 10.0, 10.25, 20.0, 22.0])
    timer = Timer(clock=lambda: next(now))
    with timer("gen"):
        pass
    with timer("gen"):
        pass
    with pytest.raises(KeyError), timer("reward"):
        raise KeyError
    assert timer.seconds == {"gen": 1.75, "reward": 2.0}
    assert timer.metrics(tokens={"gen": 500, "absent": 3, "reward": 0}) == {
        "timing_s/gen": 1.75,
        "timing_s/reward": 2.0,
        "timing_began_s/gen": 1.0,
        "timing_began_s/reward": 21.0,
        "timing_per_token_ms/gen": 3.5,
    }


def test_timer_says_what_was_hidden_behind_what_had_begun_before():
    now = iter([0.0, 0.0, 1.0, 2.0, 5.0, 8.0, 9.0, 20.0, 21.0])
    timer = Timer(clock=lambda: next(now))
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(timer("old_log_prob"))  # 0 to 8
        second.enter_context(timer("values"))  # 1 to 9
        with timer("ref"):  # 2 to 5
            pass
        first.close()
        second.close()
    with timer("adv"):
        pass
    assert timer.seconds == {"ref": 3.0, "old_log_prob": 8.0, "values": 8.0, "adv": 1.0}
    assert timer.hidden == {"values": 7.0, "ref": 3.0}


def test_tracking_does_not_import_torch():
    rooms = ["metrics", "progress", "console", "loggers", "generations", "rundir"]
    imports = "; ".join(f"import valor.tracking.{name}" for name in rooms)
    check = f"{imports}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
