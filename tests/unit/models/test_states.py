"""Projected hidden states: what they are, in packed rows as in padded ones, and the features made of them."""

import pytest
import torch
from tiny_models import build_hf, sequences

from valor.models.policy import PolicyModel
from valor.models.states import StateProjection, num_places, state_features


def normal(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("name", ["qwen2_tied", "gemma2_softcap", "gpt_neox", "gpt2_dropout"])
@pytest.mark.parametrize("packed", [False, True])
def test_states_are_those_before_each_token(name, packed, rows):
    """Against the hidden states of each row alone, read by transformers without padding."""
    model = PolicyModel(build_hf(name), packed=packed, shared=packed)
    with torch.no_grad():
        found = model(rows, projection=StateProjection(1000))
        states, log_probs = found["states"], model(rows)["log_probs"]
        for i, p, r, ids in sequences(rows):
            layers = model.hf(input_ids=ids, output_hidden_states=True).hidden_states
            expected = torch.cat([normal(layer[0, p - 1 : p - 1 + r]) for layer in layers], -1)
            torch.testing.assert_close(states[i, :r], expected, rtol=1e-4, atol=1e-4)
            assert not states[i, r:].any()
    assert states.shape[-1] == 3 * 32 and torch.equal(found["log_probs"], log_probs)


def test_more_numbers_than_asked_for_become_sums_with_random_signs():
    draw = torch.Generator().manual_seed(0)
    layers = [torch.randn(7, 50, generator=draw), torch.randn(7, 30, generator=draw)]
    projection = StateProjection(16)
    found = projection(layers)
    assert found.shape == (7, 16) and torch.equal(found, StateProjection(16)(layers))
    # One-hot inputs show the matrix: each coordinate goes to one sum, with one sign.
    eye = torch.eye(50) / (1 / 50) ** 0.5 / 50**0.5
    rows = projection([eye, torch.zeros(50, 30)]) / (16 / 80) ** 0.5 / 50**0.5
    assert ((rows.abs() > 1e-3).sum(1) == 1).all() and torch.allclose(rows.abs().sum(1), torch.ones(50), atol=1e-4)
    assert (rows > 0.5).any() and (rows < -0.5).any() and ((rows.abs() > 0.5).sum(0) <= 4).all()


def test_a_projection_keeps_scalar_products_in_the_mean():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(40, 4096, generator=draw)
    x[1::2] = x[::2] + 0.5 * x[1::2]  # pairs with a large product
    exact = normal(x) @ normal(x).T
    found = StateProjection(512)([x])
    found = found @ found.T * 4096 / 512
    assert torch.corrcoef(torch.stack([exact.flatten(), found.flatten()]))[0, 1] > 0.95


def test_features_are_state_mean_sum_and_place():
    states = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(0))
    one = torch.ones(2, 40)
    found = state_features(states, -one, one, 40)
    assert found.dtype == torch.float64 and found.shape == (2, 40, 11 + num_places(40))
    for t in (0, 5, 39):
        so_far = states[:, : t + 1].double()
        torch.testing.assert_close(found[:, t, :3], states[:, t].double())
        torch.testing.assert_close(found[:, t, 3:6], so_far.mean(1))
        torch.testing.assert_close(found[:, t, 6:9], so_far.sum(1) / 40)
    places = found[0, :, 11:].argmax(-1)
    assert (found[:, :, 11:].sum(-1) == 1).all() and places[:16].tolist() == [*range(16)]
    assert (places.diff() >= 0).all() and places[-1] == num_places(40) - 1 and len(places.unique()) < 40
    shorter = state_features(states, -one, one, 20)[0, 30:, 11:]
    assert torch.equal(shorter, shorter[:1].expand(10, -1))


def test_features_tell_how_unlikely_the_response_so_far_is():
    log_probs = torch.tensor([[-1.0, -3.0, -torch.inf, -2.0, -0.5]])
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0]])  # the third token is an observation
    found = state_features(torch.zeros(1, 5, 1), log_probs, mask, 5)[0, :, 3:5]
    assert found.tolist() == [[0, 0], [-1, -1], [-3, -3], [0, -3], [-2, -3]]
    found = state_features(torch.zeros(1, 5, 1), log_probs, torch.ones(1, 5), 5)[0, :, 3:5]
    assert found.tolist() == [[0, 0], [-1, -1], [-3, -3], [-12, -12], [-2, -12]]
