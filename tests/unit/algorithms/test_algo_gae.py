"""GAE against its definition as a loop, closed forms, a multi-turn case worked by hand, and its options."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from valor import algorithms
from valor.errors import UserError


def gae_by_loop(
    rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float | Tensor, end_values: Tensor
) -> Tensor:
    """The definition, token by token from the end: advantages [B, T] before whitening (docs/algorithms/ppo.md).

    end_values [B]: V after the last policy token, 0 where the end is terminal. lam: one λ, or one per row [B].
    """
    advantages = torch.zeros_like(values)
    next_advantage, next_value, pending = torch.zeros_like(end_values), end_values, torch.zeros_like(end_values)
    for t in reversed(range(values.shape[1])):
        is_policy = response_mask[:, t] == 1
        reward = rewards[:, t] + pending  # a reward on an observation belongs to the policy token before it
        delta = reward + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = advantage.where(is_policy, 0.0)
        # An observation token is stepped over: it hands on what came after it.
        next_advantage = advantage.where(is_policy, next_advantage)
        next_value = values[:, t].where(is_policy, next_value)
        pending = reward.masked_fill(is_policy, 0.0)
    return advantages


def random_case(rows: int, width: int, kind: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, width)
    if kind != "full":
        lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
        mask = (torch.arange(width) < lengths).float()
    if kind == "gaps":
        mask = mask * (torch.rand(rows, width, generator=generator) > 0.3)
    rewards = torch.randn(rows, width, generator=generator) * mask
    return rewards, torch.randn(rows, width, generator=generator), mask


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 70)),
    seed=st.integers(0, 10_000),
    present=st.sampled_from((0.0, 0.3, 0.9, 1.0)),
    gamma=st.sampled_from((0.0, 0.9, 0.99, 1.0)),
    lambdas=st.tuples(*[st.sampled_from((0.0, 0.5, 0.95, 1.0))] * 2),
    alpha=st.sampled_from((None, 0.05, 0.5)),
    truncated=st.booleans(),
)
def test_gae_equals_its_definition(
    shape: tuple[int, int],
    seed: int,
    present: float,
    gamma: float,
    lambdas: tuple[float, float],
    alpha: float | None,
    truncated: bool,
) -> None:
    """Gaps and rewards on observations, rows cut off, decoupled and length-adaptive λ."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(shape, generator=generator) < present).float()
    values, end = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
    rewards = torch.randn(shape, generator=generator) * (mask.cumsum(1) > 0)  # none before the first policy token
    cut_off = (torch.rand(shape[0], generator=generator) < 0.5) & truncated
    advantages, returns = algorithms.compute_advantages(
        "gae",
        rewards=rewards,
        response_mask=mask,
        values=values,
        gamma=gamma,
        lam_actor=lambdas[0],
        lam_critic=lambdas[1],
        adaptive_lam_alpha=alpha,
        whitening="none",
        **({"bootstrap_mask": cut_off, "bootstrap_values": end} if truncated else {}),
    )
    exact = (rewards.double(), values.double(), mask, gamma)
    lam = lambdas[0] if alpha is None else (1 - 1 / (alpha * mask.sum(1).clamp(min=1).double())).clamp(min=0.0)
    expected = gae_by_loop(*exact, lam, end.double() * cut_off)
    targets = gae_by_loop(*exact, lambdas[1], end.double() * cut_off) + values * mask
    torch.testing.assert_close(advantages.double(), expected, atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(returns.double(), targets, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0)])
def test_long_responses(gamma: float, lam: float) -> None:
    rewards, values, mask = random_case(3, 8192, "gaps")
    rewards = rewards * (torch.arange(8192) % 64 == 0)
    advantages, _ = algorithms.compute_advantages(
        "gae", rewards=rewards, response_mask=mask, values=values, gamma=gamma, lam=lam, whitening="none"
    )
    expected = gae_by_loop(rewards.double(), values.double(), mask, gamma, lam, torch.zeros(3, dtype=torch.float64))
    scale = expected.abs().max().item()
    assert (advantages.double() - expected).abs().max().item() < 1e-5 * max(1.0, scale)


def test_closed_forms() -> None:
    """λ = 0: the TD error; λ = 1: the discounted return to go minus the value."""
    rewards, values, mask = random_case(4, 30, "full", seed=3)
    common = {"rewards": rewards, "response_mask": mask, "values": values, "gamma": 0.9, "whitening": "none"}
    following = torch.cat([values[:, 1:], torch.zeros(4, 1)], 1)
    td, _ = algorithms.compute_advantages("gae", **common, lam=0.0)
    torch.testing.assert_close(td, rewards + 0.9 * following - values)
    powers = 0.9 ** (torch.arange(30)[None, :] - torch.arange(30)[:, None]).clamp(min=0) * torch.ones(30, 30).triu()
    monte_carlo, returns = algorithms.compute_advantages("gae", **common, lam=1.0)
    torch.testing.assert_close(returns, rewards @ powers.T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(monte_carlo, rewards @ powers.T - values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("lam", "first_turn"), [(1.0, 0.5), (0.99, 0.0425)])
def test_three_turns_with_observations_between(lam: float, first_turn: float) -> None:
    """100 action tokens a turn, 200 observation tokens after the first two; V = 0.5 on actions, noise on observations;
    reward 1 at the end: only the last TD error, 0.5, is not 0, and it decays over policy tokens alone."""
    mask = torch.cat([torch.ones(100), torch.zeros(200), torch.ones(100), torch.zeros(200), torch.ones(100)])[None]
    noise = 0.2 * torch.randn(1, 700, generator=torch.Generator().manual_seed(0))
    rewards = torch.zeros(1, 700)
    rewards[0, -1] = 1.0
    advantages, _ = algorithms.compute_advantages(
        "gae", rewards=rewards, response_mask=mask, values=torch.where(mask == 1, 0.5, noise), lam=lam, whitening="none"
    )
    by_hand = 0.5 * lam**200 * sum(lam**k for k in range(100)) / 100
    assert by_hand == pytest.approx(first_turn, abs=5e-5)
    assert advantages[0, :100].mean().item() == pytest.approx(by_hand, abs=1e-5)


def test_values_and_filler_at_masked_positions_are_never_read() -> None:
    rewards, values, mask = random_case(5, 40, "gaps")
    hole = mask == 0
    clean = algorithms.compute_advantages("gae", rewards=rewards, response_mask=mask, values=values, lam=0.9)
    dirty = algorithms.compute_advantages(
        "gae",
        rewards=rewards.masked_fill(hole, math.nan),
        response_mask=mask,
        values=values.masked_fill(hole, math.inf),
        lam=0.9,
    )
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax"])
def test_a_reward_on_an_observation_belongs_to_the_action_before_it(name: str) -> None:
    mask = torch.tensor([[0.0, 1, 1, 0, 1, 0]])
    case = {"response_mask": mask, "values": torch.zeros(1, 6), "reward_baselines": torch.zeros(1)}
    moved = torch.tensor([[0.0, 8, 2, 0, 5, 0]])
    given = torch.tensor([[7.0, 1, 0, 2, 4, 1]])  # 7 before the first action goes to that one
    for gamma in (1.0, 0.5):
        _, expected = algorithms.compute_advantages(name, rewards=moved, gamma=gamma, **case)
        _, returns = algorithms.compute_advantages(name, rewards=given, gamma=gamma, **case)
        torch.testing.assert_close(returns, expected)
        _, dropped = algorithms.compute_advantages(name, rewards=given, gamma=gamma, reward_on_masked="drop", **case)
        _, kept = algorithms.compute_advantages(name, rewards=given * mask, gamma=gamma, **case)
        torch.testing.assert_close(dropped, kept)


def test_truncation_bootstrap_falls_back_on_the_last_value() -> None:
    advantages, _ = algorithms.compute_advantages(
        "gae",
        rewards=torch.zeros(2, 3),
        response_mask=torch.tensor([[1.0, 1, 0], [1, 1, 0]]),
        values=torch.tensor([[0.2, 0.6, 9.0], [0.2, 0.6, 9.0]]),
        bootstrap_mask=torch.tensor([True, False]),
        whitening="none",
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.4, 0.0, 0.0], [-0.2, -0.6, 0.0]]))


def test_rows_without_policy_tokens_and_empty_batches() -> None:
    rewards, values, mask = random_case(3, 5, "full")
    mask[1] = 0
    advantages, _ = algorithms.compute_advantages(
        "gae", rewards=rewards, response_mask=mask, values=values, whitening="none"
    )
    assert advantages[1].abs().sum() == 0
    for shape in ((2, 3), (0, 3), (2, 0)):
        empty = torch.zeros(shape)
        advantages, returns = algorithms.compute_advantages("gae", rewards=empty, response_mask=empty, values=empty)
        assert advantages.shape == shape and not advantages.isnan().any() and not returns.any()


def test_gae_without_values_says_what_to_do() -> None:
    with pytest.raises(UserError, match="needs the critic's values"):
        algorithms.compute_advantages("gae", rewards=torch.zeros(1, 2), response_mask=torch.ones(1, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.1}, "between 0 and 1"),
        ({"lam": -0.5}, "between 0 and 1"),
        ({"adaptive_lam_alpha": 0.0}, "positive"),
    ],
)
def test_discounts_are_checked(options: dict, message: str) -> None:
    rewards, values, mask = random_case(2, 5, "full")
    with pytest.raises(UserError, match=message):
        algorithms.compute_advantages("gae", rewards=rewards, response_mask=mask, values=values, **options)


def test_advantages_do_not_depend_on_the_number_of_threads() -> None:
    rewards, values, mask = random_case(64, 1024, "gaps")
    case = {"rewards": rewards, "response_mask": mask, "values": values, "gamma": 0.99, "lam": 0.95}
    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(algorithms.compute_advantages("gae", **case)[0])
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
