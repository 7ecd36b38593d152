"""Runs whose critic trains on earlier steps' samples again (`critic.replay_steps`)."""

import shutil
from pathlib import Path

import pytest
from runs import assert_same_run, read_metrics

from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

REPLAY = ["critic.replay_steps=2", "trainer.save_freq=1", "critic.optim.lr_scheduler_type=linear"]
ENSEMBLE = [
    "critic.ensemble_size=2",
    "critic.model.value_head_init=normal",
    "critic.target=residual",
    "critic.freeze_steps=[3]",
]


@pytest.mark.parametrize("more", [[], [*ENSEMBLE, "actor_rollout_ref.rollout.n=2"]], ids=["plain", "ensemble"])
def test_a_resumed_run_equals_the_undisturbed_one(overrides, tmp_path: Path, more):
    undisturbed, resumed = tmp_path / "undisturbed", tmp_path / "resumed"
    assert main(overrides(undisturbed, *REPLAY, *more)) == 0
    shutil.copytree(undisturbed, resumed)
    for step in (3, 4):
        shutil.rmtree(resumed / f"global_step_{step}")
    shutil.rmtree(resumed / "huggingface")
    held = sorted(path.stem for path in (resumed / "global_step_2" / "phases" / "update_critic").iterdir())
    assert held == ["1", "2"]
    assert main(overrides(resumed, *REPLAY, *more)) == 0
    assert_same_run(undisturbed, resumed)


def test_earlier_samples_are_replayed_from_the_second_step_on_and_the_schedule_stays(overrides, tmp_path: Path):
    assert main(overrides(tmp_path / "replay", *REPLAY)) == 0
    assert main(overrides(tmp_path / "plain", *REPLAY, "critic.replay_steps=0")) == 0
    replay, plain = (read_metrics(tmp_path / name)[1:] for name in ("replay", "plain"))
    assert ["critic/replay_vf_loss" in row for row in replay] == [False, True, True, True]
    assert [row["critic/lr"] for row in replay] == [row["critic/lr"] for row in plain]
    assert replay[0]["critic/vf_loss"] == pytest.approx(plain[0]["critic/vf_loss"], rel=1e-5)
    assert replay[-1]["critic/vf_loss"] != pytest.approx(plain[-1]["critic/vf_loss"], rel=1e-5)
