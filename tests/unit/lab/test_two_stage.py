"""The two-stage experiment: its arms, whose critic they use, and the reward that says nothing."""

import subprocess
import sys

import pytest

from valor.config import PPOConfig, load_runs
from valor.errors import UserError
from valor.lab import two_stage
from valor.lab.random_reward import compute_score
from valor.lab.sweep import Sweep

pytestmark = pytest.mark.slow


@pytest.fixture
def planned(monkeypatch):
    """The sweep that a command line leads to, without running it."""
    found: list[Sweep] = []
    monkeypatch.setattr(two_stage, "run_sweep", lambda sweep, rerun=False: found.append(sweep) or 0)
    monkeypatch.setattr(two_stage, "_warm_start", lambda out: 0)

    def plan(*argv: str) -> Sweep:
        assert two_stage.main(list(argv)) == 0
        return found.pop()

    return plan


def settings(sweep: Sweep, arm: str) -> dict:
    return sweep.of(arm)[0].settings


def test_the_arms_of_the_demo(planned, tmp_path):
    sweep = planned("--out", str(tmp_path), "--seeds", "2", "--steps", "6")
    assert sweep.control == "ppo" and len(sweep.runs) == 2 * len(sweep.arms)
    key = "algorithm.reward_mask_ratio"
    assert [settings(sweep, f"frozen_{r}")[key] for r in ("0", "0.3", "0.5", "0.7", "1")] == [0.0, 0.3, 0.5, 0.7, 1.0]
    for arm in sweep.arms:
        of = settings(sweep, arm.name)
        second = arm.name.partition("_")[0] in ("frozen", "value", "bootstrap", "exclude", "flip")
        assert of["critic.freeze"] == second and (sweep.of(arm.name)[0].after == ("stage1",)) == second
        assert of["actor_rollout_ref.model.path"] == "OUT/start/sft/seed_0/huggingface/actor"
    assert settings(sweep, "value_1")["algorithm.missing_reward"] == "critic"
    stage1, ppo, grpo = (settings(sweep, name) for name in ("stage1", "ppo", "grpo"))
    # as many updates of the policy in stage 1, as many samples a step and updates a batch with grpo
    assert stage1["trainer.total_training_steps"] - stage1["trainer.critic_warmup"] == 6
    prompts, mini = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
    n = "actor_rollout_ref.rollout.n"
    assert grpo[prompts] * grpo[n] == ppo[prompts] * ppo[n] and grpo[mini] * grpo[n] == ppo[mini] * ppo[n]


def test_a_model_and_data_of_one_s_own(planned, tmp_path):
    sweep = planned(
        "actor_rollout_ref.model.path=my/model",
        "data.train_files=t.parquet",
        "--out",
        str(tmp_path),
        "--stage1",
        "trainer.critic_warmup=3",
    )
    assert settings(sweep, "ppo")["data.train_batch_size"] == load_runs([], PPOConfig)[0].config.data.train_batch_size
    assert settings(sweep, "frozen_0")["actor_rollout_ref.model.path"] == "my/model"
    assert settings(sweep, "stage1")["trainer.total_training_steps"] == 23  # 20 and the three ahead
    assert settings(sweep, "ppo")["trainer.critic_warmup"] == 0


def test_a_mistake_is_told_before_anything_runs(planned, tmp_path):
    with pytest.raises(UserError, match=r"algorithm\.lam: expected number from 0 to 1, got 7"):
        planned("algorithm.lam=7", "--out", str(tmp_path / "o"))
    assert not (tmp_path / "o").exists()


def test_the_random_reward_is_a_coin_in_training_and_the_grader_in_validation():
    train = [compute_score("valor/arithmetic", str(i), "3", {"split": "train", "index": i}, seed=1) for i in range(400)]
    assert 160 < sum(train) < 240 and set(train) == {0.0, 1.0}
    again = [compute_score("valor/arithmetic", str(i), "3", {"split": "train", "index": i}, seed=1) for i in range(400)]
    other = [compute_score("valor/arithmetic", str(i), "3", {"split": "train", "index": i}, seed=2) for i in range(400)]
    assert train == again and train != other
    assert compute_score("valor/arithmetic", "3", "3", {"split": "val"})["score"] == 1.0
    assert compute_score("valor/arithmetic", "4", "3")["score"] == 0.0


def test_grader_processes_do_not_import_torch_for_it():
    check = "import valor.lab.random_reward, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=120).returncode == 0
