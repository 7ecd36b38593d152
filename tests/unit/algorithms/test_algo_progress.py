"""Progress under a prover's value, by hand and against NumPy; and what it would be as a reward."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from valor import algorithms


def plain(values, step_ids, mask):
    """The definition, step by step."""
    out = np.zeros_like(values)
    for row in range(len(values)):
        own = np.flatnonzero(mask[row])
        numbers = step_ids[row, own]
        for step in np.unique(numbers):
            of_step = own[numbers == step]
            later = own[numbers > step]
            end = later[0] if len(later) else own[-1]
            out[row, of_step] = values[row, end] - values[row, of_step[0]]
    return out


def test_two_steps_and_a_last_one_by_hand():
    values = torch.tensor([[0.1, 0.2, 0.5, 0.4, 0.9, 7.0]])
    steps = torch.tensor([[1, 1, 2, 2, 3, 0]])
    mask = torch.tensor([[1.0, 1, 1, 1, 1, 0]])
    found = algorithms.progress(values, steps, mask)
    torch.testing.assert_close(found, torch.tensor([[0.4, 0.4, 0.4, 0.4, 0.0, 0.0]]))


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_against_numpy(seed, rows, width):
    rng = np.random.default_rng(seed)
    values, mask = rng.normal(size=(rows, width)), (rng.random((rows, width)) < 0.8).astype(float)
    steps = 1 + np.cumsum(rng.random((rows, width)) < 0.4, 1)
    found = algorithms.progress(torch.tensor(values), torch.tensor(steps), torch.tensor(mask))
    np.testing.assert_allclose(found.numpy(), plain(values, steps, mask), atol=1e-6)


@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_as_a_reward_it_telescopes_whoever_the_prover_is(seed, lam, weight):
    """GAE of r + Φ(s') − Φ(s) with the values V − Φ, which a critic then learns, is GAE of r with V."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values, potential = torch.randn(3, 4, 6, dtype=torch.float64, generator=generator)
    mask, potential = torch.ones(4, 6), weight * potential
    after = torch.cat([potential[:, 1:], torch.zeros(4, 1, dtype=torch.float64)], 1)
    settings = {"response_mask": mask, "gamma": 1.0, "lam": lam, "whitening": "none"}
    plain_advantages, _ = algorithms.compute_advantages("gae", rewards=rewards, values=values, **settings)
    shaped, _ = algorithms.compute_advantages(
        "gae", rewards=rewards + after - potential, values=values - potential, **settings
    )
    torch.testing.assert_close(shaped, plain_advantages)


def test_beside_the_advantage_it_is_whitened_with_it_and_the_returns_stay():
    rewards, values = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    mask, more = torch.ones(2, 2), torch.tensor([[1.0, 0.0], [0.0, -2.0]])
    inputs = {"rewards": rewards, "values": values, "response_mask": mask}
    raw, returns = algorithms.compute_advantages("gae", whitening="none", **inputs)
    found, same = algorithms.advantages_with_progress("gae", progress=more, **inputs)
    torch.testing.assert_close(found, algorithms.masked_whiten(raw + more, mask))
    assert torch.equal(returns, same)
    groups = {"rewards": rewards, "response_mask": mask, "group_ids": ["a", "a"]}
    grpo, _ = algorithms.compute_advantages("grpo", **groups)
    found, _ = algorithms.advantages_with_progress("grpo", progress=more, **groups)
    torch.testing.assert_close(found, grpo + more)


def test_progress_under_the_own_value_is_a_scale():
    """Q^π + α A^π = (1 + α) A^π + V^π, and V^π is a baseline: after whitening nothing has changed at λ = 0, γ = 1."""
    generator = torch.Generator().manual_seed(0)
    values, mask = torch.rand(5, 7, generator=generator), torch.ones(5, 7)
    rewards = torch.zeros(5, 7)
    rewards[:, -1] = values[:, -1]  # a critic that is right at the end
    own = algorithms.progress(values, torch.arange(1, 8).expand(5, 7), mask)
    inputs = {"rewards": rewards, "values": values, "response_mask": mask, "lam": 0.0}
    alone, _ = algorithms.compute_advantages("gae", **inputs)
    both, _ = algorithms.advantages_with_progress("gae", progress=3.0 * own, **inputs)
    torch.testing.assert_close(alone, both, atol=1e-5, rtol=1e-5)
