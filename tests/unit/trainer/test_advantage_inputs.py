"""What the run hands to estimators and losses: bootstrap values, components, corrections, drawn samples, counts."""

from types import SimpleNamespace

import pytest
import torch

from valor.config import ActorConfig, AlgorithmConfig, PPOConfig, RolloutCorrectionConfig, load
from valor.config.distillation import DistillationConfig
from valor.data.batch import Batch
from valor.errors import UserError
from valor.rewards.worker import NOT_GRADED, RewardResult
from valor.trainer.advantage import check_components, component_scores, compute_advantages
from valor.trainer.old_log_probs import OldLogProbs, corrected
from valor.trainer.run import SkippedUpdates
from valor.trainer.updates import Updates, counted
from valor.workers.actor import ActorWorker


def two_rows(**columns) -> Batch:
    """Two responses of one prompt: three policy tokens, and two of which the second is no policy token's."""
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    tensors = {
        "response_mask": mask,
        "response_lengths": torch.tensor([3, 2]),
        "token_level_rewards": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        "values": torch.tensor([[0.1, 0.2, 0.4], [0.5, 0.9, 0.0]]),
        **columns,
    }
    return Batch(tensors, {"uid": ["a", "a"], "finish_reason": ["stop", "length"], "reward_info": [{}, {}]})


@pytest.mark.parametrize("limit", ["length", "turns"])
def test_a_cut_off_response_goes_on_with_the_value_after_its_last_token(limit):
    batch = two_rows(bootstrap_values=torch.tensor([9.0, 0.7]))
    batch.objects["finish_reason"][1] = limit
    config = AlgorithmConfig(truncated_responses="bootstrap", adv_whitening="none")
    advantages, returns = compute_advantages(batch, config)
    assert torch.allclose(returns, torch.tensor([[1.0, 1.0, 1.0], [0.7, 0.0, 0.0]]))  # "stop": the 9 is not read
    assert torch.allclose(advantages, torch.tensor([[0.9, 0.8, 0.6], [0.2, 0.0, 0.0]]))
    _, ended = compute_advantages(batch, AlgorithmConfig(adv_whitening="none"))
    assert ended[1].tolist() == [0, 0, 0]


def test_both_lambdas_reach_gae():
    config = AlgorithmConfig(lam_actor=0.0, lam_critic=1.0, adv_whitening="none")
    advantages, returns = compute_advantages(two_rows(), config)
    assert torch.allclose(advantages[0], torch.tensor([0.1, 0.2, 0.6]))  # one step: V' - V, and 1 - V at the end
    assert torch.allclose(returns[0], torch.ones(3))


@pytest.mark.parametrize("more", [{}, {"progress": torch.full((2, 3), 0.25)}])
def test_values_from_branches_are_the_critics_targets_also_beside_progress(more):
    """V = 0.3 at the second token, by branches: A = R - 0.3 there, and the critic learns 0.3."""
    branches = {"branch_mask": torch.tensor([[0, 1, 0], [0, 0, 0]]), "branch_values": torch.full((2, 3), 0.3)}
    advantages, returns = compute_advantages(two_rows(**branches, **more), AlgorithmConfig(adv_whitening="none"))
    assert torch.allclose(advantages[0], torch.tensor([0.9, 0.7, 0.6]) + (0.25 if more else 0.0))
    assert torch.allclose(returns[0], torch.tensor([1.0, 0.3, 1.0]))


def test_a_critic_whose_value_is_the_reward_learns_at_all_tokens_whatever_the_unit_of_gae():
    settings = {"reward_source": "critic", "adv_whitening": "none"}
    batch = two_rows()
    expected = compute_advantages(batch, AlgorithmConfig(**settings))
    found = compute_advantages(batch, AlgorithmConfig(**settings, gae_unit="turn"))
    assert all(map(torch.equal, found, expected)) and "value_mask" not in batch


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline", "remax", "opo"])
def test_a_critic_beside_an_estimator_without_one_learns_outcomes(name):
    """And not the comparison with other samples, which says nothing of how good a state is."""
    baselines = {"reward_baselines": torch.tensor([0.25, 0.25])}
    config = AlgorithmConfig(adv_estimator=name, gamma=0.5)
    advantages, returns = compute_advantages(two_rows(**baselines), config)
    assert returns.tolist() == [[0.25, 0.5, 1.0], [0.0, 0.0, 0.0]]
    without = Batch({k: v for k, v in two_rows(**baselines).tensors.items() if k != "values"}, two_rows().objects)
    assert torch.equal(compute_advantages(without, config)[0], advantages)
    lost = two_rows(**baselines, reward_missing=torch.tensor([True, False]))
    by_value = AlgorithmConfig(adv_estimator="grpo", reward_mask_ratio=0.5, missing_reward="bootstrap")
    assert compute_advantages(lost, by_value)[1][0].tolist() == pytest.approx([0.4] * 3)


def test_length_adaptive_lambda_reaches_gae():
    config = AlgorithmConfig(adaptive_lam_alpha=1.0, adv_whitening="none")
    advantages, _ = compute_advantages(two_rows(), config)
    lam = 1 - 1 / 3
    expected = [0.1 + lam * (0.2 + lam * 0.6), 0.2 + lam * 0.6, 0.6]
    assert torch.allclose(advantages[0], torch.tensor(expected))


@pytest.mark.parametrize(("singleton", "expected"), [("zero", 0.0), ("raw", 1.0)])
def test_a_prompts_only_sample(singleton, expected):
    config = AlgorithmConfig(adv_estimator="rloo", singleton=singleton)
    advantages, _ = compute_advantages(two_rows().take([0]), config)
    assert advantages.tolist() == [[expected] * 3]


def test_weights_and_confidence_reach_the_optimal_token_baseline():
    columns = {
        "old_log_probs": torch.full((2, 3), 0.5).log(),
        "sum_pi_squared": torch.full((2, 3), 0.5),
        "rollout_is_weights": torch.tensor([[2.0, 1.0, 1.0], [1.0, 0.0, 0.0]]),
    }
    config = AlgorithmConfig(adv_estimator="optimal_token_baseline")
    advantages, _ = compute_advantages(two_rows(**columns), config)
    # w = 1 - 2·0.5 + 0.5 = 0.5, times 4 in the first row: baseline at t = 0 is (1·2 + 0·0.5) / 2.5.
    assert advantages[:, 0].tolist() == pytest.approx([0.2, -0.8])


def test_both_policies_reach_vtrace():
    """The second row's only token has ratio 4, truncated to 3: V + 3 (0 - V); the first row is on-policy."""
    columns = {"old_log_probs": torch.full((2, 3), 0.8).log(), "rollout_log_probs": torch.full((2, 3), 0.8).log()}
    columns["rollout_log_probs"][1, 0] = torch.tensor(0.2).log()
    config = AlgorithmConfig(adv_estimator="vtrace", adv_kwargs={"rho_bar": 3.0}, adv_whitening="none")
    advantages, returns = compute_advantages(two_rows(**columns), config)
    assert torch.allclose(returns, torch.tensor([[1.0, 1.0, 1.0], [0.5 - 3 * 0.5, 0.0, 0.0]]))
    assert torch.allclose(advantages, torch.tensor([[0.9, 0.8, 0.6], [-0.5, 0.0, 0.0]]))


def test_gdpo_gets_its_components():
    batch = two_rows()
    batch.objects["reward_info"] = [{"format": 1, "length": 0.0}, {"format": False, "length": 2.0}]
    config = AlgorithmConfig(
        adv_estimator="gdpo",
        adv_kwargs={"reward_keys": ["format", "length"], "reward_weights": [3.0, 1.0]},
        adv_whitening="none",
        norm_adv_by_std_in_grpo=False,
    )
    advantages, _ = compute_advantages(batch, config)
    assert advantages[:, 0].tolist() == pytest.approx([3 * 0.5 - 1.0, -3 * 0.5 + 1.0])


def test_components_of_a_failed_grader_and_of_none():
    failed = {NOT_GRADED: "no score within 10 s"}
    assert component_scores([{"a": 1}, failed], ["a"], -1.0)["a"].tolist() == [1.0, -1.0]
    assert component_scores([failed, failed], ["a"], -1.0)["a"].tolist() == [-1.0, -1.0]
    for info in ([{"a": 1}, {"b": 1}], [{"a": 1}, {}], [{}, {}], [failed, {}], [{"a": "yes"}, {"a": 1}]):
        with pytest.raises(UserError, match=r"reward_keys: 'a' .* \(components are (a|a, b|none)\)"):
            component_scores(info, ["a"], 0.0)


def test_components_that_the_run_adds_are_not_asked_of_the_graders():
    grade, row = RewardResult(0.0, {"a": 1.0}), SimpleNamespace(data_source="s", ground_truth="", extra_info={})
    inputs = SimpleNamespace(agents=None, train=[row], rewards=SimpleNamespace(score=lambda samples: [grade]))
    dapo = {"reward_manager": {"name": "dapo"}, "reward_kwargs": {"overlong_buffer_cfg": {"enable": True, "len": 9}}}
    models = {"reward_model": {"enable": True, "model_path": "x", "rule_weight": 1.0}}
    for reward, added in ((dapo, ["overlong_reward"]), (models, ["rm_score", "rule_score"])):
        algorithm = {"adv_estimator": "gdpo", "adv_kwargs": {"reward_keys": ["a", *added]}}
        check_components(PPOConfig.model_validate({"algorithm": algorithm, "reward": reward}), inputs)
        with pytest.raises(UserError, match=f"reward_keys: '{added[0]}'"):
            check_components(PPOConfig.model_validate({"algorithm": algorithm}), inputs)


def test_a_rejected_token_leaves_the_mask_and_the_counts():
    log_probs = torch.tensor([[-0.5, -2.6, -0.4], [-0.9, -0.8, -3.0]])
    rollout = torch.tensor([[-1.0, -2.0, -0.5], [-0.7, -1.2, -3.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    batch = Batch({"response_mask": mask, "rollout_log_probs": rollout})
    config = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.8_1.5")
    found, metrics = corrected(batch, log_probs, config)
    assert found["response_mask"].tolist() == [[0, 0, 1], [1, 0, 0]]
    weights = torch.tensor([[1.64872, 0.54881, 1.10517], [0.81873, 1.49182, 0.0]])
    assert torch.allclose(found["rollout_is_weights"], weights, atol=1e-5)
    assert counted(found).meta == {"num_tokens": 2.0, "num_sequences": 2.0, "learns": True}
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(0.6)
    assert metrics["rollout_corr/kl"] == pytest.approx(-0.04, abs=1e-6)
    nothing = counted(Batch({"response_mask": torch.zeros(2, 3)}))
    assert nothing.meta == {"num_tokens": 1.0, "num_sequences": 1.0, "learns": False}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], {"on_policy"}),
        (["ppo_epochs"], {"recompute"}),
        (["rollout_is=token"], {"on_policy", "recompute", "correct_batch", "corrects"}),
        (["vtrace"], {"on_policy", "recompute", "corrects"}),
        (["bypass_mode=true"], {"bypass"}),
        (["bypass_mode=true", "rollout_is=token"], {"bypass"}),
        (
            ["bypass_mode=true", "rollout_is=token", "loss_type=reinforce"],
            {"bypass", "correct_mini_batches", "corrects"},
        ),
        (
            ["bypass_mode=true", "rollout_rs=token_k3", "rollout_rs_threshold=1"],
            {"bypass", "correct_mini_batches", "corrects"},
        ),
    ],
)
def test_when_log_probs_are_computed_and_corrected(settings, expected):
    overrides = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    others = {"ppo_epochs": "actor_rollout_ref.actor.ppo_epochs=2", "vtrace": "algorithm.adv_estimator=vtrace"}
    overrides += [others.get(setting, f"algorithm.rollout_correction.{setting}") for setting in settings]
    assert {name for name, on in vars(OldLogProbs(load(overrides).config)).items() if on} == expected


def mini_batches_of(batch: Batch, *overrides: str) -> list[Batch]:
    config: PPOConfig = load(
        ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", *overrides]
    ).config
    group = SimpleNamespace()  # mini-batches are formed without any role
    return list(Updates(config, group, SkippedUpdates(1, print)).mini_batches("actor", batch, 1))  # type: ignore[arg-type]


def four_rows() -> Batch:
    zeros = torch.zeros(4, 2)
    names = ("old_log_probs", "rollout_log_probs", "rollout_is_weights")
    return Batch(
        {
            **{name: torch.ones(4, dtype=torch.long) for name in ("prompt_lengths", "response_lengths")},
            **{name: zeros.long() for name in ("prompts", "responses")},
            **dict.fromkeys(names, zeros),
            "response_mask": torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]),
            "advantages": torch.tensor([[1.0, 2.0], [6.0, 0.0], [0.0, 0.0], [5.0, 0.0]]),
        }
    )


def test_mini_batches_count_the_mask_that_is_left_and_keep_the_weights():
    first, second = mini_batches_of(four_rows())
    assert (first.meta["num_tokens"], first.meta["num_sequences"]) == (3.0, 2.0)
    assert (second.meta["num_tokens"], second.meta["num_sequences"]) == (1.0, 1.0)
    assert [b.meta["update"] for b in (first, second)] == [1, 2]
    assert [b.meta["last_of_step"] for b in (first, second)] == [False, True]
    assert "rollout_is_weights" in first and "old_log_probs" in first and "rollout_log_probs" not in first


def test_the_entropy_that_is_logged_is_that_of_a_token_whatever_the_loss_sums():
    """Five tokens of two responses: 0.5 nats each in the metric; the bonus is half of their sum, as the mode says."""
    worker = ActorWorker.__new__(ActorWorker)
    worker.config = ActorConfig(loss_agg_mode="seq-mean-token-sum", entropy_coeff=0.1)
    worker.loss_mode, worker._generator, worker.distillation = "vanilla", None, DistillationConfig()
    mask, meta = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]), {"num_tokens": 5.0, "num_sequences": 2.0}
    rows = Batch({"response_mask": mask, "advantages": torch.zeros(2, 3), "old_log_probs": -mask}, {}, meta)
    loss, metrics = worker._loss({"log_probs": -mask, "entropy": torch.full((2, 3), 0.5)}, rows)
    assert float(metrics["entropy"]) == pytest.approx(0.5)
    assert float(loss) == pytest.approx(-0.1 * 2.5 / 2)


def test_whitening_by_mini_batch_is_for_estimators_that_whiten():
    first, _ = mini_batches_of(four_rows(), "algorithm.adv_whitening=mini_batch")
    mean, std = 3.0, 7**0.5
    expected = torch.tensor([[(1 - mean) / std, (2 - mean) / std], [(6 - mean) / std, 0.0]])
    assert torch.allclose(first["advantages"], expected)
    own = ["algorithm.adv_whitening=mini_batch", "algorithm.adv_estimator=grpo"]
    first, _ = mini_batches_of(four_rows(), *own)
    assert first["advantages"].tolist() == [[1.0, 2.0], [6.0, 0.0]]
