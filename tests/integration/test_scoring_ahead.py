"""Grading while others are still being generated: the numbers of grading afterwards, and nothing left to grade."""

from contextlib import nullcontext

import pytest
from runs import assert_same_run

from valor.trainer.main_ppo import main
from valor.trainer.rules import Rules

pytestmark = pytest.mark.slow


def test_scoring_ahead_changes_no_number(overrides, tmp_path, monkeypatch):
    heard = []
    grade = Rules.grade

    def counting(self, batch):
        heard.append((len(self._early), len(batch)))
        return grade(self, batch)

    monkeypatch.setattr(Rules, "grade", counting)
    # Cutting the validation set into pieces repeats the rows' numbers: verdicts must not be mixed up.
    arguments = ["trainer.total_training_steps=2", "data.val_batch_size=8"]
    assert main(overrides(tmp_path / "ahead", *arguments)) == 0
    assert len(heard) >= 3 and all(early == rows for early, rows in heard)

    heard.clear()
    monkeypatch.setattr(Rules, "ahead", lambda self, prompts: nullcontext())
    assert main(overrides(tmp_path / "after", *arguments)) == 0
    assert heard and all(early == 0 for early, _ in heard)
    assert_same_run(tmp_path / "ahead", tmp_path / "after")
