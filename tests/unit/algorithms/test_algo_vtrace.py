"""V-trace against a case worked by hand, its definition as a sum, and GAE where both policies are one."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from valor import algorithms
from valor.errors import UserError


def by_hand(**changes: Any) -> tuple[Tensor, Tensor]:
    """Three tokens with V = 0.4, 0.6, 0.5, reward 1 at the end, ratios 2, 0.5 and 1."""
    case: dict[str, Any] = {
        "rewards": torch.tensor([[0.0, 0.0, 1.0]]),
        "values": torch.tensor([[0.4, 0.6, 0.5]]),
        "response_mask": torch.ones(1, 3),
        "old_log_probs": torch.tensor([[0.8, 0.2, 0.3]]).log(),
        "rollout_log_probs": torch.tensor([[0.4, 0.4, 0.3]]).log(),
        "whitening": "none",
        "c_bar": 1.0,
    }
    return algorithms.compute_advantages("vtrace", **case | changes)


def test_three_tokens_by_hand() -> None:
    """δ = 0.2, −0.1, 0.5; D_3 = 0.5, D_2 = 0.5·(−0.1) + 0.5·D_3 = 0.2, D_1 = 2·0.2 + D_2 = 0.6, as c_1 = min(1, 2)."""
    advantages, returns = by_hand()
    torch.testing.assert_close(returns, torch.tensor([[0.4 + 0.6, 0.6 + 0.2, 0.5 + 0.5]]))
    torch.testing.assert_close(advantages, torch.tensor([[0.2 + 0.2, -0.1 + 0.5, 0.5]]))  # δ_t + D_{t+1}
    _, truncated = by_hand(rho_bar=1.0)
    torch.testing.assert_close(truncated, torch.tensor([[0.4 + 0.2 + 0.2, 0.8, 1.0]]))
    assert torch.equal(by_hand(c_bar=2.0)[1], returns)  # γλc is at most 1
    halved, longer = by_hand(c_bar=1.5, lam=0.5)[1], 0.6 - 0.05 + 0.25 * 0.5  # γλc: 0.75, 0.25
    torch.testing.assert_close(halved, torch.tensor([[0.4 + 2 * 0.2 + 0.75 * (longer - 0.6), longer, 1.0]]))
    advantages, returns = by_hand(lam=1.0, lam_actor=0.5, lam_critic=0.0)
    torch.testing.assert_close(returns, torch.tensor([[0.4 + 2 * 0.2, 0.6 - 0.5 * 0.1, 1.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[0.2 + 0.5 * 0.075, -0.1 + 0.5 * 0.5, 0.5]]))  # D_2 = 0.075


def sum_of_definition(
    row: dict[str, list[float]], mask: list[float], gamma: float, lam: float, bounds: tuple[float, float], end: float
) -> tuple[list[float], list[float]]:
    """v_s − V_s = Σ_t γ^(t−s) (Π_{s ≤ i < t} λ c_i) ρ_t δ_t over policy tokens, each sum on its own, γλc at most
    1; r + γ v' − V, where a share 1 − λ of v' is V'."""
    places = [t for t, is_policy in enumerate(mask) if is_policy]
    value = [row["values"][t] for t in places] + [end]
    ratio = [row["ratio"][t] for t in places]
    rho, c = ([min(bound, x) for x in ratio] for bound in bounds)
    delta = [row["rewards"][t] + gamma * value[k + 1] - value[k] for k, t in enumerate(places)]

    def correction(start: int) -> float:
        total, product = 0.0, 1.0
        for k in range(start, len(places)):
            total += product * rho[k] * delta[k]
            product *= min(gamma * lam * c[k], 1.0)
        return total

    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for k, t in enumerate(places):
        returns[t] = value[k] + correction(k)
        advantages[t] = delta[k] + gamma * lam * correction(k + 1)
    return advantages, returns


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 40)),
    seed=st.integers(0, 10_000),
    present=st.sampled_from((0.0, 0.5, 1.0)),
    gamma=st.sampled_from((0.0, 0.9, 1.0)),
    lam=st.sampled_from((0.0, 0.5, 0.95, 1.0)),
    bounds=st.tuples(st.sampled_from((1.0, 1.5, 1e9)), st.sampled_from((1.0, 1.1))),
    truncated=st.booleans(),
)
def test_equals_its_definition(
    shape: tuple[int, int],
    seed: int,
    present: float,
    gamma: float,
    lam: float,
    bounds: tuple[float, float],
    truncated: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(shape, generator=generator) < present).float()
    draw = {name: torch.randn(shape, generator=generator) for name in ("rewards", "values", "then", "gap")}
    end = torch.randn(shape[0], generator=generator) * truncated
    advantages, returns = algorithms.compute_advantages(
        "vtrace",
        rewards=draw["rewards"] * mask,
        values=draw["values"],
        response_mask=mask,
        old_log_probs=draw["then"] + 0.5 * draw["gap"],
        rollout_log_probs=draw["then"],
        gamma=gamma,
        lam=lam,
        rho_bar=bounds[0],
        c_bar=bounds[1],
        whitening="none",
        **({"bootstrap_mask": torch.ones(shape[0]), "bootstrap_values": end} if truncated else {}),
    )
    draw["ratio"] = (draw["then"] + 0.5 * draw["gap"] - draw["then"]).double().exp()
    for i in range(shape[0]):
        row = {name: column[i].double().tolist() for name, column in draw.items()}
        expected = sum_of_definition(row, mask[i].tolist(), gamma, lam, bounds, float(end[i]))
        for found, wanted in zip((advantages, returns), expected, strict=True):
            torch.testing.assert_close(
                found[i].double(), torch.tensor(wanted, dtype=torch.float64), atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize("whitening", ["none", "batch"])
def test_equal_log_probs_are_gae_bit_for_bit(whitening: str) -> None:
    generator = torch.Generator().manual_seed(1)
    mask = (torch.rand(6, 50, generator=generator) > 0.3).float()
    rewards, values, log_probs = (torch.randn(6, 50, generator=generator) for _ in range(3))
    case: dict[str, Any] = {
        "rewards": rewards,
        "values": values,
        "response_mask": mask,
        "gamma": 0.99,
        "lam_actor": 0.95,
        "lam_critic": 1.0,
        "bootstrap_mask": torch.arange(6) % 2 == 0,
        "whitening": whitening,
    }
    plain = algorithms.compute_advantages("gae", **case)
    sampled = log_probs.masked_fill(mask == 0, torch.nan)  # what stands there is never read
    found = algorithms.compute_advantages("vtrace", **case, old_log_probs=log_probs, rollout_log_probs=sampled)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    nearly = algorithms.compute_advantages(
        "vtrace", **case, old_log_probs=log_probs + 1e-7, rollout_log_probs=log_probs
    )
    for one, other in zip(nearly, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_runaway_ratios_stay_finite() -> None:
    far = torch.tensor([[0.0, 500.0, -500.0]])
    for bound in (1.0, 1e12):
        assert all(x.isfinite().all() for x in by_hand(old_log_probs=far, rho_bar=bound))


@pytest.mark.parametrize("options", [{"rho_bar": 0.9}, {"c_bar": 0.0}, {"rho_bar": float("nan")}])
def test_bounds_below_one_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match="must be at least 1"):
        by_hand(**options)
    with pytest.raises(UserError, match="between 0 and 1"):
        by_hand(lam=1.5)
