"""Binarized, penalised, missing and replaced rewards as a run forms them; numbers by hand."""

import pytest
import torch

from phase_runs import after, made
from valor import algorithms
from valor.config import AlgorithmConfig, CriticConfig, KLControlConfig, PPOConfig
from valor.data.batch import Batch
from valor.trainer.advantage import compute_advantages
from valor.trainer.phases.measure import BatchMetrics
from valor.trainer.phases.rewards import Rewards
from valor.trainer.phases.training_rows import TrainingRows, trained
from valor.trainer.step_metrics import critic_diagnostics

MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
VALUES = torch.tensor([[0.2, 0.4, 0.6], [0.3, 0.7, 0.0]])


def rows_to_learn_from(batch: Batch, config: AlgorithmConfig) -> Batch:
    phase = made(TrainingRows, config)
    return trained(after(phase, batch)[0] if phase.wanted(phase.config) else batch)


def batch_of(scores: list[float], rows: int = 2) -> Batch:
    """Two responses of three and two tokens, repeated to `rows` rows."""
    repeat = rows // 2
    placed = torch.tensor([[0.0, 0.0, scores[0]], [0.0, scores[1], 0.0]])
    return Batch(
        {
            "response_mask": MASK.repeat(repeat, 1),
            "values": VALUES.repeat(repeat, 1),
            "token_level_scores": placed.repeat(repeat, 1),
            "old_log_probs": torch.full((rows, 3), -1.0),
            "ref_log_probs": torch.full((rows, 3), -1.5),
        },
        {"uid": [str(i // 2) for i in range(rows)], "finish_reason": ["stop"] * rows},
    )


def shaped(batch: Batch, step: int = 1, **settings) -> tuple[Batch, AlgorithmConfig, dict[str, float]]:
    config = AlgorithmConfig(adv_whitening="none", **settings)
    metrics = made(Rewards, config).shape_rewards(batch, step)  # type: ignore[attr-defined]
    return batch, config, metrics


def test_the_kl_penalty_comes_after_the_score_and_the_mask_takes_both() -> None:
    """KL estimate k1 = 0.5 a token, weight 0.1: every policy token pays 0.05; a masked trajectory has nothing left."""
    kl = {"use_kl_in_reward": True, "kl_ctrl": KLControlConfig(kl_coef=0.1)}
    batch, _, metrics = shaped(batch_of([1.0, 0.0]), **kl)
    expected = torch.tensor([[-0.05, -0.05, 0.95], [-0.05, -0.05, 0.0]])
    torch.testing.assert_close(batch["token_level_rewards"], expected)
    assert metrics == {"actor/reward_kl_penalty": 0.5, "actor/reward_kl_penalty_coeff": 0.1}
    batch, _, metrics = shaped(batch_of([1.0, 0.0]), **kl, reward_mask_ratio=0.5)
    lost = batch["reward_missing"]
    assert lost.sum() == 1 and metrics["reward/missing_ratio"] == 0.5
    torch.testing.assert_close(batch["token_level_rewards"], expected * (~lost).float()[:, None])


def test_noise_is_added_to_outcomes_alone_and_follows_from_seed_and_step() -> None:
    batch, _, _ = shaped(batch_of([1.0, 0.5], rows=4000), reward_noise=0.3)
    noise = (batch["token_level_rewards"] - batch["token_level_scores"]).sum(1)
    assert abs(float(noise.mean())) < 0.02 and float(noise.std()) == pytest.approx(0.3, abs=0.02)
    rewards = batch["token_level_rewards"]
    assert (rewards[0::2, :2] == 0).all() and (rewards[1::2, ::2] == 0).all()
    assert torch.equal(shaped(batch_of([1.0, 0.5], rows=4000), reward_noise=0.3)[0]["token_level_rewards"], rewards)
    later, _, _ = shaped(batch_of([1.0, 0.5], rows=4000), step=2, reward_noise=0.3)
    assert not torch.equal(later["token_level_rewards"], rewards)


def test_the_critic_as_reward_source() -> None:
    """A = V(last) − V_t and returns V(last); the reward that is logged is V(last) at the last token."""
    batch, config, _ = shaped(batch_of([1.0, 0.0]), reward_source="critic", lam=0.5)
    torch.testing.assert_close(batch["token_level_rewards"], torch.tensor([[0, 0, 0.6], [0, 0.7, 0]]))
    advantages, returns = compute_advantages(batch, config)
    torch.testing.assert_close(advantages, torch.tensor([[0.4, 0.2, 0.0], [0.4, 0.0, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.6, 0.6, 0.6], [0.7, 0.7, 0.0]]))
    whitened, _ = compute_advantages(batch, config.model_copy(update={"adv_whitening": "batch"}))
    on = whitened[MASK.bool()]
    assert abs(on.mean()) < 1e-6 and on.std() == pytest.approx(1.0, abs=1e-4)


def test_an_estimator_without_a_critic_takes_the_value_as_a_score() -> None:
    batch, config, _ = shaped(batch_of([1.0, 0.0]), reward_source="critic", adv_estimator="rloo")
    advantages, _ = compute_advantages(batch, config)
    torch.testing.assert_close(advantages, torch.tensor([[-0.1, -0.1, -0.1], [0.1, 0.1, 0.0]]))


@pytest.mark.parametrize(
    ("policy", "flip", "first", "second"),
    [
        ("zero", False, [-0.2, -0.4, -0.6], [-0.3, -0.7, 0.0]),
        ("zero", True, [0.2, 0.4, 0.6], [0.3, 0.7, 0.0]),
        ("bootstrap", False, [0.4, 0.2, 0.0], [0.4, 0.0, 0.0]),
        ("critic", False, [0.4, 0.2, 0.0], [0.4, 0.0, 0.0]),
    ],
)
def test_what_a_missing_reward_means(policy, flip, first, second) -> None:
    batch, config, _ = shaped(
        batch_of([1.0, 1.0]), reward_mask_ratio=1.0, missing_reward=policy, reward_mask_flip_adv_when_masked=flip
    )
    advantages, _ = compute_advantages(batch, config)
    torch.testing.assert_close(advantages, torch.tensor([first, second]))
    assert len(rows_to_learn_from(batch, config)) == 2


@pytest.mark.parametrize(
    ("policy", "flip", "first_token", "last_token"),
    [
        ("zero", False, "down", "down"),
        ("zero", True, "up", "up"),
        ("bootstrap", False, "up", "none"),
        ("critic", False, "up", "none"),
        ("exclude", False, "none", "none"),
    ],
)
def test_where_the_gradient_pushes_a_trajectory_without_reward(policy, flip, first_token, last_token) -> None:
    """A right answer whose reward is missing, with a critic that grows surer of it (0.2, 0.4, 0.6): `zero` makes its
    tokens less probable, the last one most of all; the flip turns that around; with `bootstrap` and `critic` the token
    that raised the value gains."""
    batch, config, _ = shaped(
        batch_of([1.0, 1.0]), reward_mask_ratio=1.0, missing_reward=policy, reward_mask_flip_adv_when_masked=flip
    )
    batch["advantages"], _ = compute_advantages(batch, config)
    log_probs = torch.full((2, 3), -1.0, requires_grad=True)
    rows = rows_to_learn_from(batch, config)
    loss, _ = algorithms.policy_loss(
        "ppo",
        log_probs=log_probs[: len(rows)],
        old_log_probs=log_probs[: len(rows)].detach(),
        advantages=rows["advantages"],
        response_mask=rows["response_mask"],
        num_tokens=5.0,
    )
    loss.backward()
    assert log_probs.grad is not None
    push = -log_probs.grad[0]
    assert [_word(push[0]), _word(push[2])] == [first_token, last_token]
    if policy == "zero":
        assert push[2].abs() > push[0].abs()  # the surer the critic, the harder the push


def _word(push: torch.Tensor) -> str:
    return "none" if abs(push) < 1e-7 else "up" if push > 0 else "down"


def test_bootstrap_decays_with_lambda_and_critic_does_not() -> None:
    masked = {"reward_mask_ratio": 1.0, "lam": 0.5}
    batch, config, _ = shaped(batch_of([1.0, 1.0]), missing_reward="bootstrap", **masked)
    torch.testing.assert_close(compute_advantages(batch, config)[0][0], torch.tensor([0.3, 0.2, 0.0]))
    batch, config, _ = shaped(batch_of([1.0, 1.0]), missing_reward="critic", **masked)
    torch.testing.assert_close(compute_advantages(batch, config)[0][0], torch.tensor([0.4, 0.2, 0.0]))


def test_excluded_trajectories_are_not_trained_on() -> None:
    batch, config, _ = shaped(batch_of([1.0, 1.0], rows=8), reward_mask_ratio=0.25, missing_reward="exclude")
    batch["advantages"], batch["returns"] = compute_advantages(batch, config)
    kept = rows_to_learn_from(batch, config)
    assert len(kept) == 6 and not kept["reward_missing"].any()
    assert not batch["advantages"][batch["reward_missing"]].any()
    batch, config, _ = shaped(batch_of([1.0, 1.0]), reward_mask_ratio=1.0, missing_reward="exclude")
    assert len(rows_to_learn_from(batch, config)) == 0


def test_truncated_episodes_are_in_no_loss() -> None:
    """What counts is how an episode ends: a summary that was cut off on the way does not."""
    config, batch = AlgorithmConfig(truncated_responses="exclude"), batch_of([1.0, 1.0], rows=6)
    reasons = ["stop", "length", "turns", "length", "stop", "eos"]
    batch = batch.union(Batch(objects={"finish_reason": reasons, "number": list(range(6))}))
    assert rows_to_learn_from(batch, config).objects["number"] == [0, 4, 5]
    joined = batch.union(Batch({"episode": torch.tensor([0, 1, 2, 3, 3, 4])}))
    assert rows_to_learn_from(joined, config).objects["number"] == [0, 3, 4, 5]
    assert rows_to_learn_from(joined, AlgorithmConfig(truncated_responses="end")) is joined


def test_excluded_trajectories_have_no_part_in_what_is_said_of_returns_and_values() -> None:
    """Four of eight have no reward, so no return: all metrics of returns, advantages and values are the others'."""
    batch, config, _ = shaped(batch_of([1.0, 0.25], rows=8), reward_mask_ratio=0.5, missing_reward="exclude")
    batch["advantages"], batch["returns"] = compute_advantages(batch, config)
    lengths = batch["response_mask"].sum(1).long()
    batch = batch.union(Batch({"response_lengths": lengths, "prompt_lengths": lengths}))
    measure = made(BatchMetrics, config, actor_rollout_ref={"rollout": {"n": 2}})
    metrics, others = measure.run(batch, 1)[1], measure.run(rows_to_learn_from(batch, config), 1)[1]
    of_all = ("critic/score", "critic/rewards", "response_length", "prompt_length", "reward/equal_groups")
    learnt = {name: value for name, value in metrics.items() if not name.startswith(of_all)}
    assert learnt == {name: others[name] for name in learnt} and learnt["critic/returns/min"] == 0.25
    assert {"critic/vf_explained_var", "critic/baseline_variance/group_mean"} <= learnt.keys()


def test_a_fixed_ratio_is_kept_over_steps_and_over_a_resume() -> None:
    """A tenth of four trajectories: two in five steps, whenever the run was interrupted."""
    config = AlgorithmConfig(reward_mask_ratio=0.1)
    whole, first = made(Rewards, config, seed=3), made(Rewards, config, seed=3)

    def draw(rewards: Rewards, step: int) -> list[bool]:
        batch = batch_of([1.0, 1.0], rows=4)
        rewards.shape_rewards(batch, step)
        return batch["reward_missing"].tolist()

    drawn = [draw(whole, step) for step in range(1, 11)]
    assert sum(map(sum, drawn)) == 4
    again = [draw(first, step) for step in range(1, 6)]
    resumed = made(Rewards, config, seed=3)
    resumed.load_state_dict(first.state_dict())
    assert again + [draw(resumed, step) for step in range(6, 11)] == drawn
    other = made(Rewards, config, seed=4)
    assert [draw(other, step) for step in range(1, 11)] != drawn


def test_all_samples_of_a_prompt_lose_their_reward_together() -> None:
    batch, _, _ = shaped(batch_of([1.0, 1.0], rows=8), reward_mask_ratio=0.5, reward_mask_level="group")
    lost = batch["reward_missing"].view(4, 2)
    assert lost.sum() == 4 and (lost[:, 0] == lost[:, 1]).all()


def test_frozen_steps() -> None:
    critic = CriticConfig(freeze_steps=["1-3", "5", "8-"])
    assert [step for step in range(1, 11) if not critic.frozen_at(step)] == [4, 6, 7]
    assert not CriticConfig().frozen_at(1) and CriticConfig(freeze=True).frozen_at(1)


def test_value_errors_by_position_and_spreads() -> None:
    """Errors 0.1 … 0.5 over five tokens: one a fifth; the row of two has parts one and three."""
    mask = torch.tensor([[1.0, 1, 1, 1, 1], [1, 0, 1, 0, 0]])
    values = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5], [0.3, 9.0, 0.1, 9.0, 9.0]])
    batch = Batch({"response_mask": mask, "values": values, "returns": torch.zeros(2, 5), "advantages": values})
    found = critic_diagnostics(batch, PPOConfig.model_validate({"data": {"train_files": ["x"]}}))
    errors = [found[f"critic/vf_abs_error/fifth_{k}"] for k in range(1, 6)]
    assert errors == pytest.approx([0.2, 0.2, 0.2, 0.4, 0.5])
    spread = found["critic/values/histogram"]
    assert (spread.low, spread.high, sum(spread.counts)) == (pytest.approx(0.1), 0.5, 7)
    assert found["reward/from_critic"] == 0.0
