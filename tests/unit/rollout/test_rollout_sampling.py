import numpy as np
import pytest
import torch

from valor.rollout.base import SamplingParams
from valor.rollout.sampling import BatchSampler, search_cdf, truncate, uniform_stream

CPU = torch.device("cpu")


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sample(logits: torch.Tensor, uniforms: torch.Tensor, *params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    return BatchSampler(params, CPU)(logits, uniforms)


def test_stream_is_a_function_of_seed_and_index() -> None:
    long = uniform_stream((42, 3, 7), 1000)
    assert np.array_equal(long[:10], uniform_stream((42, 3, 7), 10))
    assert not np.array_equal(long[:10], uniform_stream((42, 3, 8), 10))
    assert not np.array_equal(long[:10], uniform_stream((3, 42, 7), 10))
    assert long.min() >= 0 and long.max() < 1


def test_stream_never_changes_between_releases() -> None:
    # Written down on the day it was made: a run's samples must be the same after an upgrade.
    assert uniform_stream((1, 2, 3), 3) == pytest.approx(
        [0.5820700278594911, 0.83131338559194, 0.048709001519276485], abs=1e-15
    )


def test_streams_of_neighbouring_seeds_are_uniform_together() -> None:
    first = np.array([uniform_stream((0, step, index), 1)[0] for step in range(50) for index in range(80)])
    counts, _ = np.histogram(first, bins=20, range=(0, 1))
    # Chi-square with 19 degrees of freedom: 43.8 is exceeded with probability 0.001.
    assert ((counts - 200.0) ** 2 / 200.0).sum() < 43.8


def test_negative_and_large_seeds_are_streams_of_their_own() -> None:
    streams = {uniform_stream(seed, 1)[0] for seed in [(-1,), (1,), (2**62,), (0,), (0, 0)]}
    assert len(streams) == 5


def test_search_finds_the_interval_that_holds_the_uniform() -> None:
    weights = torch.tensor([[0.1, 0.0, 0.4, 0.5, 0.0]]).repeat(6, 1)
    uniforms = doubles(0.0, 0.0999, 0.1001, 0.4999, 0.5001, 1 - 2**-53)
    assert search_cdf(weights, uniforms).tolist() == [0, 0, 2, 2, 3, 3]


def test_search_needs_no_normalisation_and_crosses_blocks() -> None:
    weights = torch.zeros(3, 1000)
    weights[:, 3], weights[:, 700] = 2.0, 6.0
    assert search_cdf(weights, doubles(0.2499, 0.2501, 1 - 2**-53)).tolist() == [3, 700, 700]


def test_search_never_returns_a_token_of_weight_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(2000, 777, generator=generator)
    weights[weights < 0.9] = 0
    edges = doubles(0.0, 1 - 2**-53, 0.5, 2**-53).repeat(500)
    chosen = search_cdf(weights, edges)
    assert (weights.gather(1, chosen[:, None]) > 0).all()


def test_sampled_distribution_is_the_softmax() -> None:
    logits = torch.tensor([1.5, 0.0, -1.0, 0.7, 2.0])
    count = 20_000
    uniforms = torch.from_numpy(uniform_stream((7,), count))
    params = SamplingParams(temperature=0.8)
    tokens, _ = sample(logits.expand(count, -1), uniforms, *[params] * count)
    expected = torch.softmax(logits / 0.8, dim=0) * count
    observed = torch.bincount(tokens, minlength=5)
    # Chi-square with 4 degrees of freedom: 18.5 is exceeded with probability 0.001.
    assert ((observed - expected) ** 2 / expected).sum() < 18.5


def test_log_probs_are_those_at_the_temperature_before_truncation() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    for temperature in (0.5, 1.0, 2.0):
        params = SamplingParams(temperature=temperature, top_k=1)
        tokens, log_probs = sample(logits, doubles(0.99), params)
        scaled = np.array([2.0, 1.0, 0.0]) / temperature
        assert tokens.item() == 0
        assert log_probs.item() == pytest.approx(scaled[0] - np.log(np.exp(scaled).sum()), abs=1e-6)


def test_greedy_takes_the_first_maximum_and_reports_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    tokens, log_probs = sample(logits, doubles(0.9999), SamplingParams(temperature=0))
    assert tokens.item() == 1
    assert log_probs.item() == pytest.approx(3 - np.log(1 + 2 * np.exp(3) + np.exp(1)), abs=1e-6)


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 1.9]]).repeat(4, 1)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=3.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.5),
    ]
    uniforms = doubles(0.01, 0.01, 0.01, 0.6)
    together, log_probs = sample(logits, uniforms, *params)
    for row, each in enumerate(params):
        alone, alone_log_probs = sample(logits[row : row + 1], uniforms[row : row + 1], each)
        assert alone.item() == together[row].item()
        assert alone_log_probs.item() == pytest.approx(log_probs[row].item(), abs=1e-6)
    # By hand: weights e^0, e^1, e^2, e^1.9 -> greedy 2; uniform 0.01 falls into token 0 (share 0.056);
    # of the top two {2, 3} the first; the nucleus of half the mass is {2, 3} and 0.6 lies beyond token 2 (0.525).
    assert together.tolist() == [2, 0, 2, 3]


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    _, log_probs = sample(logits, doubles(0.999), SamplingParams())
    assert log_probs.dtype == torch.float32
    assert log_probs.item() == pytest.approx(-np.log(1 + np.exp(-1) + np.exp(-2)), abs=1e-6)


def kept(probs: list[float], top_k: int, top_p: float) -> list[int]:
    out = truncate(torch.tensor([probs]), torch.tensor([top_k]), torch.tensor([top_p]))[0]
    assert all(after in (0.0, pytest.approx(before)) for before, after in zip(probs, out.tolist(), strict=True))
    return out.nonzero().flatten().tolist()


def test_top_k_keeps_the_k_most_probable_and_ties_with_the_last() -> None:
    assert kept([0.1, 0.4, 0.3, 0.2], 2, 1.0) == [1, 2]
    assert kept([0.1, 0.4, 0.3, 0.2], 9, 1.0) == [0, 1, 2, 3]
    assert kept([0.25, 0.25, 0.3, 0.2], 2, 1.0) == [0, 1, 2]


def test_top_p_keeps_the_smallest_set_that_reaches_its_share() -> None:
    assert kept([0.1, 0.4, 0.3, 0.2], -1, 0.39) == [1]
    assert kept([0.1, 0.4, 0.3, 0.2], -1, 0.41) == [1, 2]
    assert kept([0.1, 0.4, 0.3, 0.2], 0, 0.71) == [1, 2, 3]
    assert kept([0.1, 0.4, 0.3, 0.2], 0, 0.999999) == [0, 1, 2, 3]


def test_top_p_acts_on_the_renormalised_top_k() -> None:
    # Of {0.4, 0.3} the first holds 0.571 of the mass, so 0.5 of it needs one token, and 0.6 of it two.
    assert kept([0.1, 0.4, 0.3, 0.2], 2, 0.5) == [1]
    assert kept([0.1, 0.4, 0.3, 0.2], 2, 0.6) == [1, 2]


@pytest.mark.parametrize("spread", [0.05, 1.0, 6.0])
def test_truncation_of_a_large_vocabulary_agrees_with_a_full_sort(spread: float) -> None:
    generator = torch.Generator().manual_seed(3)
    probs = torch.softmax(torch.randn(6, 12_000, generator=generator) * spread, dim=-1)
    top_k = torch.tensor([-1, 50, -1, 3000, 5000, 0])
    top_p = torch.tensor([0.9, 1.0, 0.3, 0.8, 1.0, 1.0])
    out = truncate(probs, top_k, top_p)
    for row in range(6):
        order = np.argsort(-probs[row].double().numpy(), kind="stable")
        ranked = probs[row].double().numpy()[order]
        if top_k[row] > 0:
            ranked = ranked[: int(top_k[row])]
        mass = ranked.cumsum()
        size = len(ranked)
        if top_p[row] < 1:
            size = int((mass < float(top_p[row]) * mass[-1]).sum()) + 1
        expected = np.sort(order[:size])
        assert abs(int((out[row] > 0).sum()) - size) <= 1  # a tie at the edge, or float32 rounding of one token
        assert len(np.intersect1d(out[row].nonzero().flatten().numpy(), expected)) >= size - 1


def test_params_without_meaning_are_refused() -> None:
    for wrong in ({"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.5}, {"max_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SamplingParams(**wrong)
