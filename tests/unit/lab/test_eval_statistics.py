"""The intervals and the test of `valor eval`, against how often they are right."""

import numpy as np
import pytest

from valor.lab import statistics
from valor.lab.evaluation import _markdown
from valor.lab.statistics import bootstrap_interval, sign_flip_p
from valor.trainer.validation import Graded, prompt_metrics


def test_nineteen_of_twenty_intervals_hold_the_truth(monkeypatch) -> None:
    """Pass rates of 120 prompts, 4 answers each; the true mean is that of the distribution of difficulty."""
    monkeypatch.setattr(statistics, "_DRAWN", 1000)
    draw = np.random.default_rng(0)
    holds = 0
    for _ in range(400):
        low, high = bootstrap_interval(draw.binomial(4, draw.beta(2.0, 1.0, 120)) / 4) or (0.0, 0.0)
        holds += low <= 2 / 3 <= high
    assert 0.92 < holds / 400 < 0.98


def test_resamples_by_parts_are_those_of_all_at_once(monkeypatch) -> None:
    values = np.random.default_rng(1).random(300).tolist()
    together = bootstrap_interval(values)
    monkeypatch.setattr(statistics, "_MOST_NUMBERS", 7 * 300)
    assert bootstrap_interval(values) == together


def test_one_in_twenty_tests_of_equal_models_is_below_five_percent(monkeypatch) -> None:
    monkeypatch.setattr(statistics, "_ENUMERATED", 999)
    draw = np.random.default_rng(2)
    p = [sign_flip_p((draw.binomial(4, 0.5, 40) - draw.binomial(4, 0.5, 40)).tolist()) for _ in range(300)]
    assert 0.02 < np.mean([value <= 0.05 for value in p]) < 0.08
    assert sign_flip_p((draw.binomial(4, 0.8, 40) - draw.binomial(4, 0.5, 40)).tolist()) < 0.01


def test_metrics_of_prompts_by_hand() -> None:
    """Two prompts of one source with four answers, one of another with four."""
    uids, sources = list("aaaabbbbcccc"), ["x"] * 8 + ["y"] * 4
    right = [1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    answers = ["7", "7", "8", None, "1", "1", "2", "3", None, None, None, None]
    columns = (uids, sources, map(float, right), map(bool, right), answers)
    by_source = prompt_metrics([*map(Graded, *columns)])
    assert by_source["x"]["mean@4"] == [0.5, 0.25]
    assert by_source["x"]["pass@2"] == pytest.approx([1 - 1 / 6, 1 - 3 / 6])
    assert by_source["x"]["pass@4"] == [1.0, 1.0] and by_source["x"]["maj@4"] == [1.0, 0.0]
    assert by_source["y"] == {"mean@4": [1.0], "pass@2": [1.0], "pass@4": [1.0]}


def test_a_bar_in_a_name_is_no_edge_of_a_cell() -> None:
    measured = {"prompts": 1, "tokens": 2.0, "cut": 0.0, "errors": 0, "metrics": {}}
    policies = [{"name": "m", "sources": {"中文|来源": measured}}]
    *_, row = _markdown({"command": "c", "policies": policies, "comparisons": []}).splitlines()
    assert row.replace("\\|", "").count("|") == 7 and "中文\\|来源" in row
