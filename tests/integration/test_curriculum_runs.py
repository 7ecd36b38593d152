"""Runs whose rows are drawn by difficulty, or by a class of the user's own: what is measured, and exact resume."""

import json
from pathlib import Path

import pytest
from runs import assert_same_weights, read_metrics

from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

OWN = """
class Hardest:
    '''Rows by their last score, ascending, without end.'''

    def __init__(self, data_source, data_config):
        self.scores = [0.0] * len(data_source)
        self.sources = {row.data_source for row in data_source}

    def __len__(self):
        return len(self.scores)

    def __iter__(self):
        while True:
            for row in sorted(range(len(self.scores)), key=lambda row: (self.scores[row], row))[:8]:
                yield row

    def update(self, batch):
        for row, score in zip(batch["row"].tolist(), batch["scores"].tolist()):
            self.scores[row] = score + 1.0

    def state_dict(self):
        return {"scores": self.scores}

    def load_state_dict(self, state):
        self.scores = state["scores"]
"""
DIFFICULTY = ["data.sampler.difficulty.enable=true", "data.train_max_samples=12"]


@pytest.mark.parametrize("kind", ["difficulty", "own", "filtered", "predicted"])
def test_a_resumed_run_draws_what_the_whole_one_drew(overrides, tmp_path: Path, kind: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    more = {
        "difficulty": DIFFICULTY,
        "own": [f"data.sampler.class_path={tmp_path}/own.py", "data.sampler.class_name=Hardest"],
        "predicted": [*DIFFICULTY, "data.sampler.difficulty.predictor=critic"],
        "filtered": [*DIFFICULTY, "algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=4"],
    }[kind]
    more += ["trainer.save_freq=2", "trainer.test_freq=-1", "data.val_files=null", "trainer.log_generations=8"]
    assert main(overrides(tmp_path / "whole", *more)) == 0
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'whole' / 'global_step_2'}"]
    assert main(overrides(tmp_path / "resumed", *more, *resume)) == 0
    assert_same_weights(tmp_path / "whole", tmp_path / "resumed")
    whole, resumed = (read_metrics(tmp_path / name) for name in ("whole", "resumed"))
    assert [row for row in whole if row["step"] > 2] == [row for row in resumed if row["step"] > 2]
    if kind == "own":
        prompts = [
            [json.loads(line)["prompt"] for line in (tmp_path / "whole" / "samples" / f"step_{step}.jsonl").open()]
            for step in (1, 2)
        ]
        assert not {*prompts[0]} & {*prompts[1]}  # rows that have been answered go to the end
        return
    for row in whole:
        if row["step"] > 0:
            pools = [key for key in row if key.startswith("sampler/")]
            assert sum(row[key] for key in pools if key.endswith("/rows")) == 12
            drawn = sum(row[key] for key in pools if key.endswith("/drawn"))
            assert drawn == (row["training/filter_groups/prompts"] if kind == "filtered" else 8)
    if kind == "predicted":
        assert any("sampler/predictor/error" in row for row in whole)
    last = whole[-1]
    assert last["sampler/new/rows"] < 4 and any(key.endswith("/zero_variance") for key in last)


def test_answers_without_a_grade_say_nothing_about_their_prompt(overrides, tmp_path: Path) -> None:
    grader = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    "
    (tmp_path / "reward.py").write_text(grader + "return [1.0][int(ground_truth) % 2]\n")  # odd ones: an IndexError
    more = ["trainer.total_training_steps=1", "reward.max_error_ratio=1", "data.val_files=null"]
    reward = f"reward.custom_reward_function.path={tmp_path / 'reward.py'}"
    assert main(overrides(tmp_path / "run", *DIFFICULTY, *more, reward)) == 0
    row = read_metrics(tmp_path / "run")[-1]
    failed = row["reward/errors"] / 2  # prompts: two samples each
    assert failed > 0 and row["sampler/new/rows"] == 12 - (8 - failed)


def test_an_epoch_of_ones_own_sampler_is_as_long_as_the_sampler_says(overrides, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("return len(self.scores)", "return 24"))
    more = [f"data.sampler.class_path={tmp_path}/own.py", "data.sampler.class_name=Hardest", "data.val_files=null"]
    more += ["data.train_max_samples=12", "trainer.total_training_steps=null", "trainer.total_epochs=1"]
    assert main(overrides(tmp_path / "run", *more)) == 0
    assert read_metrics(tmp_path / "run")[-1]["step"] == 3  # batches of 8, as in verl, where 12 rows would be one
