"""Grading while others are still being generated: the numbers of grading afterwards, and nothing left to grade."""

import pytest
from runs import assert_same_run

from valor.collector.grading import Grading
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow


def test_scoring_ahead_changes_no_number(overrides, tmp_path, monkeypatch):
    heard = []
    grade = Grading._by_rule

    def counting(self, batch):
        heard.append((len(self._early), len(batch)))
        return grade(self, batch)

    monkeypatch.setattr(Grading, "_by_rule", counting)
    arguments = ["trainer.total_training_steps=2"]
    assert main(overrides(tmp_path / "ahead", *arguments)) == 0
    assert len(heard) >= 3 and all(early == rows for early, rows in heard)

    heard.clear()
    monkeypatch.setattr(Grading, "sink", lambda self, prompts, **_: None)
    assert main(overrides(tmp_path / "after", *arguments)) == 0
    assert heard and all(early == 0 for early, _ in heard)
    assert_same_run(tmp_path / "ahead", tmp_path / "after")
