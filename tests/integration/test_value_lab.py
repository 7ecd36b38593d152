"""Whole runs with rewards that are missing or come from the critic, frozen critics and ensembles."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from runs import assert_same_run, read_metrics, weights
from safetensors.torch import load_file

from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def critic(overrides, tmp_path_factory) -> Path:
    """A critic that a PPO run has trained for four steps, as a Hugging Face directory."""
    run_dir = tmp_path_factory.mktemp("stage1") / "run"
    assert main(overrides(run_dir)) == 0
    return run_dir / "huggingface" / "critic"


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def state(folder: Path) -> dict[str, torch.Tensor]:
    """All weights and optimizer state of a role's checkpoint."""
    return {k: v for p in sorted(folder.glob("*.safetensors")) for k, v in load_file(p).items()}


def test_a_frozen_critic_stays_as_it_was_and_the_run_resumes(critic, overrides, tmp_path) -> None:
    frozen = [
        f"critic.model.path={critic}",
        "critic.freeze=true",
        "algorithm.reward_source=critic",
        "trainer.total_training_steps=5",
        "trainer.save_freq=1",
        "data.val_files=null",
    ]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert main(overrides(whole, *frozen)) == 0
    assert same(weights(whole, "critic"), load_file(critic / "model.safetensors"))
    first = state(whole / "global_step_1" / "critic")
    assert first and not any("exp_avg" in name for name in first)
    assert same(first, state(whole / "global_step_5" / "critic"))
    rows = read_metrics(whole)
    assert all(row["critic/frozen"] == 1.0 and "critic/vf_loss" not in row for row in rows)
    assert all(row["critic/rewards/mean"] == pytest.approx(row["critic/returns/mean"], abs=0.05) for row in rows)
    assert any(row["critic/rewards/mean"] != row["critic/score/mean"] for row in rows)

    assert main(overrides(resumed, *frozen, "trainer.resume_mode=resume_path",
                          f"trainer.resume_from_path={whole / 'global_step_3'}")) == 0  # fmt: skip
    assert same(weights(resumed, "actor"), weights(whole, "actor"))
    assert read_metrics(resumed) == rows[3:]


def test_a_critic_freezes_and_thaws_by_step(overrides, tmp_path) -> None:
    run_dir = tmp_path / "thaw"
    assert main(overrides(run_dir, "critic.freeze_steps=[1-2,4]", "trainer.save_freq=1", "data.val_files=null")) == 0
    at = [state(run_dir / f"global_step_{step}" / "critic") for step in (1, 2, 3, 4)]
    assert any("exp_avg" in name for name in at[2])
    assert [same(a, b) for a, b in pairwise(at)] == [True, False, True]
    assert [row["critic/frozen"] for row in read_metrics(run_dir)] == [1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("policy", ["zero", "bootstrap", "exclude", "critic"])
def test_missing_rewards_train_and_resume(policy, overrides, tmp_path) -> None:
    masked = [
        "algorithm.reward_mask_ratio=0.3",
        f"algorithm.missing_reward={policy}",
        "algorithm.lam=0.9",
        "trainer.save_freq=1",
        "data.val_files=null",
    ]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert main(overrides(whole, *masked)) == 0
    rows = read_metrics(whole)
    # 16 trajectories a step at 0.3: 4.8 are owed every step.
    assert [round(row["reward/missing_ratio"] * 16) for row in rows] == [4, 5, 5, 5]
    assert all(torch.tensor(row["actor/pg_loss"]).isfinite() for row in rows)
    assert main(overrides(resumed, *masked, "trainer.resume_mode=resume_path",
                          f"trainer.resume_from_path={whole / 'global_step_2'}")) == 0  # fmt: skip
    assert read_metrics(resumed) == rows[2:]
    assert same(weights(resumed, "actor"), weights(whole, "actor"))


def test_with_every_reward_excluded_nothing_is_learnt(overrides, tiny, tmp_path) -> None:
    run_dir = tmp_path / "nothing"
    nothing = ["algorithm.reward_mask_ratio=1", "algorithm.missing_reward=exclude", "data.val_files=null"]
    assert main(overrides(run_dir, *nothing)) == 0
    assert same(weights(run_dir, "actor"), load_file(tiny["model"] / "model.safetensors"))
    assert read_metrics(run_dir)[-1]["reward/missing_ratio"] == 1.0


def test_binarized_scores(overrides, tmp_path) -> None:
    """The grader's 0 and 1, with a threshold below both: every score is 1; the grader's own mean is still logged."""
    run_dir = tmp_path / "binary"
    binary = ["algorithm.reward_binarize=true", "algorithm.reward_threshold=-0.5", "data.val_files=null"]
    assert main(overrides(run_dir, *binary)) == 0
    rows = read_metrics(run_dir)
    assert all(row["critic/score/mean"] == 1.0 for row in rows)
    assert all(row["reward/valor/arithmetic/mean"] < 1.0 for row in rows)


def test_an_ensemble_disagrees_is_saved_and_resumes(overrides, tmp_path) -> None:
    ensemble = [
        "critic.ensemble_size=2",
        "critic.ensemble_reduce=min",
        "critic.model.value_head_init=normal",
        "trainer.save_freq=2",
        "data.val_files=null",
    ]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert main(overrides(whole, *ensemble)) == 0
    rows = read_metrics(whole)
    assert all(row["critic/ensemble_std"] > 0 for row in rows)
    assert not same(weights(whole, "critic"), weights(whole, "critic_2"))
    assert main(overrides(resumed, *ensemble, "trainer.resume_mode=resume_path",
                          f"trainer.resume_from_path={whole / 'global_step_2'}")) == 0  # fmt: skip
    assert same(weights(resumed, "critic_2"), weights(whole, "critic_2"))
    assert same(weights(resumed, "actor"), weights(whole, "actor"))


@pytest.mark.usefixtures("hosts")
def test_the_same_masks_under_ray(overrides, tmp_path) -> None:
    masked = ["algorithm.reward_mask_ratio=0.5", "algorithm.missing_reward=critic"]
    assert main(overrides(tmp_path / "here", *masked)) == 0
    assert main(overrides(tmp_path / "ray", *masked, "trainer.controller=ray")) == 0
    assert_same_run(tmp_path / "here", tmp_path / "ray")
