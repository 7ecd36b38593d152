"""A best validation counts as long as later ones measure the same."""

import shutil
from pathlib import Path

import pytest
from test_early_ends import Counting


class Measured(Counting):
    """Its validation gives `score`."""

    def __init__(self, folder: Path, score: float, **trainer) -> None:
        super().__init__(folder, **trainer)
        self.score, files = score, [str(folder.with_name("val.jsonl"))]
        data = self.config.data.model_copy(update={"val_files": files})
        self.config = self.record.config = self.config.model_copy(update={"data": data})

    def validate(self):
        if self.record.best is None or self.score > self.record.best["value"]:
            self.record.best = {"step": self.step, "value": self.score}
        return {"val/score": self.score}


@pytest.mark.parametrize(("more_rows", "best"), [(False, 0.9), (True, 0.2)])
def test_the_best_of_other_validation_data_is_forgotten(more_rows, best, tmp_path):
    (tmp_path / "val.jsonl").write_text("{}\n")
    first, second = (Measured(tmp_path / "run", score, resume_changed="allow") for score in (0.9, 0.2))
    first.total_steps = 4
    assert first.fit() == 0
    shutil.rmtree(tmp_path / "run" / "huggingface")
    (tmp_path / "val.jsonl").write_text("{}\n" * (1 + more_rows))
    assert second.fit() == 0
    assert second.record.best is not None and second.record.best["value"] == best
