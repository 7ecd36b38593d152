"""The two-stage experiment: its arms, whose critic they use, and the reward that says nothing."""

from pathlib import Path

import pytest

from valor.lab.sweep_plan import Sweep, plan_sweep, read_sweep
from valor.user_files import load_file

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


def settings(sweep: Sweep, arm: str) -> dict:
    return sweep.of(arm)[0].settings


@pytest.mark.long
def test_the_arms(monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = plan_sweep(read_sweep(ROOT / "examples" / "lab" / "two_stage.yaml"))
    assert sweep.control == "ppo" and len(sweep.runs) == 3 * len(sweep.arms)
    key = "algorithm.reward_mask_ratio"
    assert [settings(sweep, f"frozen_{r}")[key] for r in ("0", "0.3", "0.5", "0.7", "1")] == [0.0, 0.3, 0.5, 0.7, 1.0]
    for arm in sweep.arms:
        of = settings(sweep, arm)
        second = arm.partition("_")[0] in ("frozen", "value", "bootstrap", "exclude", "flip")
        assert of["critic.freeze"] == second and (sweep.of(arm)[0].after == {"stage1 seed 0"}) == second
        assert of["actor_rollout_ref.model.path"] == "runs/demo/sft/huggingface/actor"
    assert settings(sweep, "value_1")["algorithm.missing_reward"] == "critic"
    assert "reward.custom_reward_function.reward_kwargs.seed=2" in sweep.of("random")[2].command
    stage1, ppo, grpo = (settings(sweep, name) for name in ("stage1", "ppo", "grpo"))
    # as many updates of the policy in stage 1, as many samples a step and updates a batch with grpo
    steps = "trainer.total_training_steps"
    assert stage1[steps] - stage1["trainer.critic_warmup"] == ppo[steps]
    prompts, mini = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
    n = "actor_rollout_ref.rollout.n"
    assert grpo[prompts] * grpo[n] == ppo[prompts] * ppo[n] and grpo[mini] * grpo[n] == ppo[mini] * ppo[n]


def test_the_random_reward_is_a_coin_in_training_and_the_grader_in_validation():
    compute_score = load_file(str(ROOT / "examples" / "lab" / "random_reward.py"), "path").compute_score
    train = [compute_score("valor/arithmetic", str(i), "3", {"split": "train", "index": i}, seed=1) for i in range(400)]
    assert 160 < sum(train) < 240 and set(train) == {0.0, 1.0}
    again = [compute_score("valor/arithmetic", str(i), "3", {"split": "train", "index": i}, seed=1) for i in range(400)]
    other = [compute_score("valor/arithmetic", str(i), "3", {"split": "train", "index": i}, seed=2) for i in range(400)]
    assert train == again and train != other
    assert compute_score("valor/arithmetic", "3", "3", {"split": "val"})["score"] == 1.0
    assert compute_score("valor/arithmetic", "4", "3")["score"] == 0.0
