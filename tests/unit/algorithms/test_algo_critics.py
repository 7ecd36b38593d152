"""What is made of critics: the gate, mini-critics, λ along a response, imitation. By hand, and against plain NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from valor import algorithms
from valor.algorithms.critic_gate import critic_weight
from valor.algorithms.gae import lam_along
from valor.errors import UserError

often = settings(max_examples=80, deadline=None, derandomize=True)
SQUARE = torch.ones(2, 2)


def evpo(**options):
    """Two samples of two tokens; outcomes 1 and 0, whose mean is 0.5."""
    told: dict[str, float] = {}
    case = {"rewards": torch.tensor([[0.0, 1.0], [0.0, 0.0]]), "response_mask": SQUARE, "whitening": "none"}
    advantages, returns = algorithms.compute_advantages("evpo", **case | {"report": told.__setitem__} | options)
    assert torch.equal(returns, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    return advantages.tolist(), told


def test_a_critic_that_misleads_gives_way_to_the_mean() -> None:
    """V = 0 where the outcome is 1 and 1 where it is 0: Var(G) = 1/4, G − V = ±1 with variance 1, EV = −3."""
    wrong = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    for gate in ("hard", "smooth"):
        advantages, told = evpo(values=wrong, gate=gate)
        assert advantages == [[0.5, 0.5], [-0.5, -0.5]]
        assert told == pytest.approx({"critic/gate": 0.0, "critic/gate_explained_var": -3.0})


def test_a_critic_that_explains_is_used() -> None:
    """V = 0.75, 0.25: G − V = ±0.25 with variance 1/16, EV = 3/4. Smooth: 3/4 of ±0.25 and 1/4 of ±0.5 is ±0.3125."""
    values = torch.tensor([[0.75, 0.75], [0.25, 0.25]])
    advantages, told = evpo(values=values)
    assert advantages == [[0.25, 0.25], [-0.25, -0.25]]
    assert told == pytest.approx({"critic/gate": 1.0, "critic/gate_explained_var": 0.75})
    advantages, told = evpo(values=values, gate="smooth")
    assert advantages == [[0.3125, 0.3125], [-0.3125, -0.3125]] and told["critic/gate"] == pytest.approx(0.75)


def test_the_mean_of_a_prompts_samples() -> None:
    """Each sample is its own prompt's only one: its mean is its outcome."""
    values = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    advantages, _ = evpo(values=values, baseline="group", group_ids=["a", "b"])
    assert advantages == [[0.0, 0.0], [0.0, 0.0]]


def test_outcomes_that_agree_close_the_gate() -> None:
    weight = critic_weight(torch.rand(2, 2), SQUARE, SQUARE)
    assert weight == (0.0, 0.0)


def test_unknown_gates_are_named() -> None:
    with pytest.raises(UserError, match="hrad"):
        evpo(values=SQUARE, gate="hrad")
    with pytest.raises(UserError, match="baseline"):
        evpo(values=SQUARE, baseline="prompt")


def a_case(seed: int, rows: int = 6, width: int = 7):
    draw = np.random.default_rng(seed)
    mask = (np.arange(width) < draw.integers(1, width + 1, (rows, 1))) & (draw.random((rows, width)) > 0.2)
    mask[:, 0] = True
    rewards, groups = draw.normal(size=(rows, width)) * mask, draw.integers(0, 3, rows)
    values = draw.normal(size=(rows, width)) * draw.choice([0.1, 1.0])
    return rewards, mask, values, groups


def gae_in_numpy(rewards, mask, values, gamma, lam):
    """Row by row, from the end; lam: a function of place and number of the row's policy tokens."""
    out = np.zeros_like(values)
    for i, row in enumerate(mask):
        places = np.flatnonzero(row)
        advantage = value = 0.0
        for k, t in reversed(list(enumerate(places))):
            advantage = rewards[i, t] + gamma * value - values[i, t] + gamma * lam(k, len(places)) * advantage
            out[i, t], value = advantage, values[i, t]
    return out


@often
@given(
    seed=st.integers(0, 10_000),
    gate=st.sampled_from(["hard", "smooth"]),
    baseline=st.sampled_from(["batch", "group"]),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.8, 0.0]),
)
def test_the_gate_agrees_with_numpy(seed, gate, baseline, gamma, lam) -> None:
    rewards, mask, values, groups = a_case(seed)
    outcome = gae_in_numpy(rewards, mask, values, gamma, lambda *_: 1.0) + values * mask
    explained = 1 - np.var((outcome - values)[mask]) / np.var(outcome[mask])
    g = float(explained > 0) if gate == "hard" else max(explained, 0.0)
    of_row = np.array([outcome[i][mask[i]].mean() for i in range(len(mask))])
    mean = np.array([of_row[groups == one].mean() if baseline == "group" else of_row.mean() for one in groups])
    expected = (
        g * gae_in_numpy(rewards, mask, values, gamma, lambda *_: lam) + (1 - g) * (outcome - mean[:, None]) * mask
    )
    told: dict[str, float] = {}
    found, returns = algorithms.compute_advantages(
        "evpo",
        rewards=torch.tensor(rewards),
        response_mask=torch.tensor(mask).double(),
        values=torch.tensor(values),
        group_ids=groups.tolist(),
        gamma=gamma,
        lam=lam,
        whitening="none",
        gate=gate,
        baseline=baseline,
        report=told.__setitem__,
    )
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    assert told == pytest.approx({"critic/gate": g, "critic/gate_explained_var": explained}, abs=1e-6)
    learnt = gae_in_numpy(rewards, mask, values, gamma, lambda *_: lam) + values * mask
    np.testing.assert_allclose(returns.numpy(), learnt, atol=1e-6)


def test_lambda_along_a_response_by_hand() -> None:
    """Five policy tokens with an observation among them; two; one; none."""
    mask = torch.tensor([[1.0, 1, 0, 1, 1, 1], [0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    found = lam_along([1.0, 0.5, 0.9], mask)
    expected = torch.tensor([1.0, 0.75, 0.5, 0.7, 0.9, 1.0, 0.9, 1.0], dtype=torch.float64)
    torch.testing.assert_close(found[mask > 0], expected)
    assert found.isfinite().all()
    assert (lam_along([0.7], mask) == 0.7).all()


@often
@given(seed=st.integers(0, 10_000), points=st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_lambda_along_a_response_agrees_with_numpy(seed, points) -> None:
    rewards, mask, values, _ = a_case(seed)

    def lam(k: int, length: int) -> float:
        return float(np.interp(k / max(length - 1, 1), np.linspace(0, 1, len(points)), points))

    found, returns = algorithms.compute_advantages(
        "gae",
        rewards=torch.tensor(rewards),
        response_mask=torch.tensor(mask).double(),
        values=torch.tensor(values),
        gamma=0.95,
        lam=0.5,
        lam_positions=points,
        whitening="none",
    )
    np.testing.assert_allclose(found.numpy(), gae_in_numpy(rewards, mask, values, 0.95, lam), atol=1e-6)
    targets = gae_in_numpy(rewards, mask, values, 0.95, lambda *_: 0.5) + values * mask  # λ of the critic is `lam`
    np.testing.assert_allclose(returns.numpy(), targets, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam_positions": [1.0, 1.2]}, "lam_positions must be between"),
        ({"lam_positions": [1.0, 0.9], "adaptive_lam_alpha": 0.1}, "drop one"),
        ({"lam_positions": [1.0], "gae_unit": "turn", "turn_ids": SQUARE.long()}, "use token"),
    ],
)
def test_lambdas_that_contradict_each_other(options, message) -> None:
    case = {"rewards": SQUARE, "response_mask": SQUARE, "values": SQUARE}
    with pytest.raises(UserError, match=message):
        algorithms.compute_advantages("gae", **case, **options)


def test_imitation_of_right_answers_by_hand() -> None:
    """−(−1 − 2 − 3) / 3 over the three tokens of the one right answer; the wrong one and the padding have no part."""
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-5.0, -5.0, -7.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    loss = algorithms.positive_nll(log_probs, mask, torch.tensor([1.0, 0.0]))
    assert float(loss.detach()) == 2.0
    loss.backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-1 / 3] * 3, [0.0] * 3]))
    assert float(algorithms.positive_nll(log_probs, mask, torch.zeros(2))) == 0.0


@often
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 5))
def test_parts_of_a_mini_batch_imitate_as_the_whole(seed, cut) -> None:
    _, mask, log_probs, groups = a_case(seed)
    right = (groups == 0).astype(float)
    number = (mask * right[:, None]).sum()
    expected = -(log_probs * mask * right[:, None]).sum() / max(number, 1)
    inputs = torch.tensor(log_probs), torch.tensor(mask).double(), torch.tensor(right)
    whole = algorithms.positive_nll(*inputs)
    parts = [algorithms.positive_nll(*(x[s] for x in inputs), max(number, 1)) for s in (slice(cut), slice(cut, None))]
    assert float(whole) == pytest.approx(expected, abs=1e-6) == pytest.approx(float(sum(parts)), abs=1e-6)
