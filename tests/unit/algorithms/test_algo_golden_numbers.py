"""Small worked cases whose numbers verl's functions printed (version 0.10.0.dev), for what the vectors leave out."""

import math

import pytest
import torch
from torch import Tensor

from valor import algorithms

NAN = math.nan  # where the reference gives no number


def close(ours: Tensor, theirs: list, tolerance: float = 2e-6) -> None:
    expected = torch.tensor(theirs)
    shown = ~expected.isnan()
    torch.testing.assert_close(ours.detach()[shown], expected[shown], atol=tolerance, rtol=0.0)


@pytest.mark.parametrize(
    ("gamma", "lam", "advantages", "returns"),
    [
        (1.0, 1.0, [[0.809776, 0.728799, 0.647821], [-1.052709, -1.133687, NAN]], [[1.0, 1.0, 1.0], [-1.0, -1.0, NAN]]),
        (
            0.9,
            0.95,
            [[0.708174, 0.723276, 0.751369], [-0.972125, -1.210694, NAN]],
            [[0.751568, 0.8685, 1.0], [-0.8325, -1.0, NAN]],
        ),
    ],
)
def test_gae(gamma: float, lam: float, advantages: list, returns: list) -> None:
    ours = algorithms.compute_advantages(
        "gae",
        rewards=torch.tensor([[0.0, 0, 1], [0, -1, 0]]),
        response_mask=torch.tensor([[1.0, 1, 1], [1, 1, 0]]),
        values=torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 9.0]]),
        gamma=gamma,
        lam=lam,
    )
    close(ours[0], advantages)
    close(ours[1], returns)


def test_gae_across_a_tool_call() -> None:
    case = {
        "rewards": torch.tensor([[0.0, 0, 0, 0, 1]]),
        "response_mask": torch.tensor([[1.0, 1, 0, 0, 1]]),
        "values": torch.tensor([[0.1, 0.2, 7.0, 8.0, 0.5]]),
        "lam": 0.95,
    }
    advantages, returns = algorithms.compute_advantages("gae", **case)
    close(advantages, [[0.739849, 0.397843, 0.0, 0.0, -1.137692]])
    close(returns, [[0.93625, 0.975, 0.0, 0.0, 1.0]])


REWARDS = torch.tensor([[0.0, 1], [0, 0], [0, 1], [0, 2], [0, 5]])
MASK = torch.tensor([[1.0, 1], [1, 0], [1, 1], [1, 1], [1, 1]])
GROUPS = ["a", "a", "a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "options", "raw", "pair_of_singletons"),
    [
        ("grpo", {}, [0.577349, -1.154699, 0.577349, 1.999998, 4.999995], [0.0, 0.0]),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, [1 / 3, -2 / 3, 1 / 3, 2.0, 5.0], [0.0, 0.0]),
        ("rloo", {}, [0.5, -1.0, 0.5, 2.0, 5.0], [0.0, 0.0]),
        ("opo", {}, [0.2, -0.8, 0.2, 2.0, 5.0], [0.0, 0.0]),
        ("gpg", {}, [0.416667, -0.833333, 0.416667, 2.5, 6.25], [0.0, 0.0]),
        ("reinforce_plus_plus_baseline", {}, [-0.619857, -1.098033, -0.619857, 0.177102, 1.611630], [0.0, 0.0]),
    ],
)
def test_group_estimators(name: str, options: dict, raw: list[float], pair_of_singletons: list[float]) -> None:
    case = {"rewards": REWARDS, "response_mask": MASK, "group_ids": GROUPS, **options}
    advantages, returns = algorithms.compute_advantages(name, **case, singleton="raw")
    close(advantages[:, 0], raw, 6e-6)
    assert torch.equal(advantages, returns) and advantages[1, 1] == 0
    advantages, _ = algorithms.compute_advantages(name, **case)
    close(advantages[:, 0], raw[:3] + pair_of_singletons, 6e-6)


def test_reinforce_plus_plus() -> None:
    advantages, returns = algorithms.compute_advantages(
        "reinforce_plus_plus", rewards=REWARDS, response_mask=MASK, gamma=0.9
    )
    close(returns, [[0.9, 1.0], [0.0, 0.0], [0.9, 1.0], [1.8, 2.0], [4.5, 5.0]])
    first = [-0.581976, -0.523778]
    close(advantages, [first, [-1.105754, 0.0], first, [-0.058198, 0.058198], [1.513138, 1.804126]])


def test_grpo_passk() -> None:
    advantages, _ = algorithms.compute_advantages(
        "grpo_passk", rewards=REWARDS, response_mask=MASK, group_ids=["a", "a", "a", "b", "b"]
    )
    close(advantages[:, 0], [0.0, 0.0, 0.0, 0.0, 1.414213])


def test_optimal_token_baseline() -> None:
    advantages, returns = algorithms.compute_advantages(
        "optimal_token_baseline",
        rewards=torch.tensor([[0.0, 1], [0, 0], [1, 0]]),
        response_mask=torch.tensor([[1.0, 1], [1, 1], [1, 0]]),
        group_ids=[0, 0, 0],
        old_log_probs=torch.tensor([[0.5, 0.25], [0.5, 0.5], [0.8, 0.1]]).log(),
        sum_pi_squared=torch.tensor([[0.4, 0.3], [0.4, 0.5], [0.7, 0.2]]),
    )
    close(advantages, [[0.444444, 0.428571], [-0.555556, -0.571429], [0.444444, 0.0]])
    close(returns, [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])


@pytest.mark.parametrize(
    ("mode", "scale", "expected"),
    [
        ("token-mean", None, 2.333333),
        ("token-sum", None, 7.0),
        ("seq-mean-token-sum", None, 3.5),
        ("seq-mean-token-sum-norm", None, 1.166667),
        ("seq-mean-token-sum-norm", 7.0, 0.5),
        ("seq-mean-token-mean", None, 2.75),
    ],
)
def test_aggregation_modes(mode: str, scale: float | None, expected: float) -> None:
    losses = torch.arange(1.0, 10.0).view(3, 3)
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert algorithms.aggregate_loss(losses, mask, mode, scale).item() == pytest.approx(expected, abs=1e-6)


def test_aggregation_over_a_global_count() -> None:
    """The reference multiplies by its 2 ranks, as its engine averages over them; ours leaves that to the engine."""
    losses, mask = torch.arange(1.0, 10.0).view(3, 3), torch.tensor([[1.0, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert 2 * algorithms.aggregate_loss(losses, mask, "token-mean", denominator=10).item() == pytest.approx(1.4)


@pytest.mark.parametrize(
    ("kind", "values", "gradient"),
    [
        ("k1", [0.5, -1.0, -29.0], [1.0, 1.0, 1.0]),
        ("abs", [0.5, 1.0, 29.0], [1.0, -1.0, -1.0]),
        ("k2", [0.125, 0.5, 420.5], [0.5, -1.0, -29.0]),
        ("k3", [0.106531, 0.718282, 10.0], [0.393469, -1.718282, 0.0]),
        ("k3+", [0.106531, 0.718282, 10.0], [0.5, -1.0, -29.0]),
        ("k1+", [0.5, -1.0, -29.0], [0.5, -1.0, -29.0]),
    ],
)
def test_kl_estimators(kind: str, values: list[float], gradient: list[float]) -> None:
    log_probs = torch.tensor([-1.0, -2.0, -30.0], requires_grad=True)
    kl = algorithms.kl_penalty(log_probs, torch.tensor([-1.5, -1.0, -1.0]), kind)
    kl.sum().backward()
    close(kl, values)
    assert log_probs.grad is not None
    close(log_probs.grad, gradient)


def test_adaptive_kl_controller() -> None:
    controller = algorithms.KLController(0.1, target_kl=6.0, horizon=10000)
    controller.update(12.0, 256)
    assert controller.value == pytest.approx(0.100512)
    controller.update(0.0, 256)
    assert controller.value == pytest.approx(0.09999738, abs=1e-8)


def test_kl_penalty_in_the_reward() -> None:
    log_probs, ref_log_probs = torch.tensor([[-1.0, -2], [-3, -1]]), torch.tensor([[-1.5, -1], [-2, -5]])
    rewards, current = algorithms.subtract_divergence(
        torch.tensor([[0.0, 1], [1, 0]]),
        algorithms.kl_penalty(log_probs, ref_log_probs, "k1"),
        torch.tensor([[1.0, 1], [1, 0]]),
        kl_coef=0.1,
    )
    close(rewards, [[-0.05, 1.1], [1.1, 0.0]])
    assert current == pytest.approx(-0.625)


def test_value_and_whitening() -> None:
    loss, metrics = algorithms.value_loss(
        values=torch.tensor([[1.0, 0, 2]]),
        old_values=torch.zeros(1, 3),
        returns=torch.tensor([[0.5, 1, 0]]),
        response_mask=torch.ones(1, 3),
    )
    assert loss.item() == pytest.approx(0.875) and metrics["vf_clipfrac"].item() == 0.0
    close(algorithms.masked_whiten(torch.tensor([[1.0, 2, 3]]), torch.ones(1, 3)), [[-1.0, 0.0, 1.0]])


OLD = torch.tensor([[-1.0, -2, -0.5], [-0.7, -1.2, -3]])
NEW = torch.tensor([[-0.5, -2.6, -0.4], [-0.9, -0.8, -3]])
SIGNS = torch.tensor([[1.0, 1, 1], [-1, -1, -1]])
LOSS_MASK = torch.tensor([[1.0, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize(
    ("name", "options", "loss", "gradient"),
    [
        ("vanilla", {}, -0.108685, [[0.0, -0.109762, -0.221034], [0.163746, 0.298365, 0.0]]),
        ("vanilla", {"clip_ratio_high": 0.28}, -0.124685, None),
        ("dppo_tv", {}, -0.012268, None),
        ("dppo_kl", {}, 0.152604, [[-0.329744, -0.109762, -0.221034], [0.163746, 0.298365, 0.0]]),
        ("gspo", {}, 0.052585, [[-0.166667] * 3, [0.276293, 0.276293, 0.0]]),
        ("sapo", {}, -0.020551, [[-0.24779, -0.086967, -0.183687], [0.20284, 0.349156, 0.0]]),
        ("gpg", {}, 0.36, [[-0.2, -0.2, -0.2], [0.2, 0.2, 0.0]]),
        ("geo_mean", {}, 0.100167, [[0.0, -0.150806, -0.150806], [0.276293, 0.276293, 0.0]]),
        ("dro", {"dro_beta": 0.1}, 0.3682, [[-0.19, -0.212, -0.198], [0.196, 0.208, 0.0]]),
        ("cispo", {}, 0.285042, [[-0.24, -0.16, -0.221034], [0.163746, 0.24, 0.0]]),
        (
            "kl_cov",
            {"kl_cov_ratio": 0.3},
            -0.19643,
            [[-0.329744, -0.109762, -0.201034], [0.163746, 0.298365, 0.0]],
        ),
    ],
)
def test_policy_losses(name: str, options: dict, loss: float, gradient: list | None) -> None:
    new = NEW.clone().requires_grad_()
    ours, metrics = algorithms.policy_loss(
        name, log_probs=new, old_log_probs=OLD, advantages=SIGNS, response_mask=LOSS_MASK, **options
    )
    ours.backward()
    assert ours.item() == pytest.approx(loss, abs=1e-6)
    assert metrics["ppo_kl"].item() == pytest.approx(-0.04, abs=1e-6)
    if gradient is not None:
        assert new.grad is not None
        close(new.grad, gradient)


def test_dual_clip() -> None:
    new = OLD.clone()
    new[1, 1] += 1.5
    new.requires_grad_()
    loss, metrics = algorithms.policy_loss(
        "ppo", log_probs=new, old_log_probs=OLD, advantages=SIGNS, response_mask=LOSS_MASK
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.2, abs=1e-6)
    assert metrics["pg_clipfrac_lower"].item() == pytest.approx(0.2)
    assert new.grad is not None and new.grad[1, 1] == 0.0


TOKEN_WEIGHTS = [[1.64872, 0.54881, 1.10517], [0.81873, 1.49182, 0.0]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rollout_is": "token"}, TOKEN_WEIGHTS),
        ({"rollout_is": "token", "rollout_is_threshold": ".5_1.5"}, [[0.0, *TOKEN_WEIGHTS[0][1:]], TOKEN_WEIGHTS[1]]),
        ({"rollout_is": "sequence"}, [[1.0, 1.0, 1.0], [1.2214, 1.2214, 0.0]]),
        (
            {"rollout_is": "token", "rollout_is_batch_normalize": True},
            [[1.4686, 0.48885, 0.98443], [0.72928, 1.32884, 0.0]],
        ),
    ],
)
def test_rollout_importance_weights(options: dict, expected: list) -> None:
    correction = algorithms.rollout_correction(log_probs=NEW, rollout_log_probs=OLD, response_mask=LOSS_MASK, **options)
    assert correction.weights is not None
    close(correction.weights, expected, 1e-5)
    assert torch.equal(correction.response_mask, LOSS_MASK)


@pytest.mark.parametrize(
    ("option", "threshold", "kept"),
    [
        ("token_k1", ".8_1.5", [[0, 0, 1], [1, 0, 0]]),
        ("seq_sum_k1", ".9_1.1", [[1, 1, 1], [0, 0, 0]]),
        ("seq_mean_k3", 0.05, [[0, 0, 0], [0, 0, 0]]),
        ("seq_max_k2", 0.2, [[1, 1, 1], [1, 1, 0]]),
        ("token_k1,seq_mean_k3", ".5_2.0,0.2", [[1, 1, 1], [1, 1, 0]]),
    ],
)
def test_rollout_rejection(option: str, threshold: float | str, kept: list) -> None:
    correction = algorithms.rollout_correction(
        log_probs=NEW,
        rollout_log_probs=OLD,
        response_mask=LOSS_MASK,
        rollout_rs=option,
        rollout_rs_threshold=threshold,
    )
    assert correction.weights is None
    assert correction.response_mask.tolist() == kept
    removed = 1 - correction.response_mask.sum().item() / LOSS_MASK.sum().item()
    assert correction.metrics["rollout_rs_masked_fraction"] == pytest.approx(removed)


def test_off_policy_metrics() -> None:
    metrics = algorithms.off_policy_metrics(NEW, OLD, LOSS_MASK)
    expected = {
        "training_ppl": 2.77546,
        "rollout_ppl": 2.89849,
        "kl": -0.04,
        "k3_kl": 0.08265,
        "chi2_token": 0.42735,
        "chi2_seq": 0.24591,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-5)
