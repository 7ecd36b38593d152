"""Rollout correction: bounds, levels, degenerate batches and mistakes."""

import pytest
import torch

from valor import algorithms
from valor.algorithms.rollout_correction import ROLLOUT_RS
from valor.errors import UserError


def case(scale: float = 0.5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(6, 8, generator=generator) - 0.1
    mask = (torch.rand(6, 8, generator=generator) > 0.3).float()
    mask[5] = 0
    return {
        "log_probs": rollout + scale * torch.randn(6, 8, generator=generator),
        "rollout_log_probs": rollout,
        "response_mask": mask,
    }


@pytest.mark.parametrize("level", ["token", "prefix", "sequence"])
def test_no_gap_means_weight_one_and_nothing_rejected(level: str) -> None:
    inputs = case(scale=0.0)
    options = ",".join(ROLLOUT_RS)
    thresholds = ",".join("0.9_1.1" if name.endswith("k1") else "0.1" for name in ROLLOUT_RS)
    correction = algorithms.rollout_correction(
        **inputs, rollout_is=level, rollout_rs=options, rollout_rs_threshold=thresholds
    )
    mask = inputs["response_mask"]
    assert correction.weights is not None and torch.equal(correction.weights, mask)
    assert torch.equal(correction.response_mask, mask)
    assert correction.metrics["rollout_is_eff_sample_size"] == pytest.approx(1.0)
    assert correction.metrics["rollout_rs_masked_fraction"] == 0.0
    assert algorithms.off_policy_metrics(**inputs)["kl"] == 0.0


@pytest.mark.parametrize("level", ["token", "prefix", "sequence"])
def test_bounds(level: str) -> None:
    inputs = case()
    mask = inputs["response_mask"]
    ratio = ((inputs["log_probs"] - inputs["rollout_log_probs"]) * mask).double()
    exponents = {"token": ratio, "prefix": ratio.cumsum(1), "sequence": ratio.sum(1, keepdim=True).expand(6, 8)}
    raw = exponents[level].exp().float() * mask
    truncated = algorithms.rollout_correction(**inputs, rollout_is=level, rollout_is_threshold=1.3).weights
    torch.testing.assert_close(truncated, raw.clamp(max=1.3))
    icepop = algorithms.rollout_correction(**inputs, rollout_is=level, rollout_is_threshold="0.7_1.3")
    torch.testing.assert_close(icepop.weights, raw * ((raw >= 0.7) & (raw <= 1.3)))
    outside = (((raw < 0.7) | (raw > 1.3)) & (mask == 1)).sum() / mask.sum()
    assert icepop.metrics["rollout_is_oob_ratio"] == pytest.approx(outside.item())
    normalised = algorithms.rollout_correction(**inputs, rollout_is=level, rollout_is_batch_normalize=True).weights
    assert normalised is not None
    if level == "token":
        assert normalised[mask == 1].mean().item() == pytest.approx(1.0, abs=1e-6)
    else:
        rows = normalised.sum(1)[:5] / mask.sum(1)[:5]
        assert rows.mean().item() == pytest.approx(1.0, abs=1e-6)


def test_a_sequence_is_rejected_as_a_whole_and_a_token_alone() -> None:
    inputs = case()
    mask = inputs["response_mask"]
    x = (inputs["log_probs"] - inputs["rollout_log_probs"]) * mask
    by_token = algorithms.rollout_correction(**inputs, rollout_rs="token_k2", rollout_rs_threshold=0.05).response_mask
    assert torch.equal(by_token, mask * (0.5 * x.square() <= 0.05))
    by_row = algorithms.rollout_correction(**inputs, rollout_rs="seq_max_k2", rollout_rs_threshold=0.5)
    rows = (0.5 * x.square()).amax(1) <= 0.5
    assert torch.equal(by_row.response_mask, mask * rows[:, None]) and 0 < rows.sum() < 6
    both = algorithms.rollout_correction(
        **inputs, rollout_rs="token_k2,seq_max_k2", rollout_rs_threshold="0.05,0.5"
    ).response_mask
    assert torch.equal(both, by_token * by_row.response_mask)
    assert by_row.metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(1 - rows[:5].float().mean().item())


def test_k1_bounds_are_on_the_inverse_ratio() -> None:
    """A token that the rollout found likelier than the trainer, π_rollout/π_train = 1.5, is outside of 0.8_1.2."""
    inputs = {
        "log_probs": torch.tensor([[-1.0, -1.0]]),
        "rollout_log_probs": torch.tensor([[-1.0, -1.0]]) + torch.tensor([[1.5, 0.9]]).log(),
        "response_mask": torch.ones(1, 2),
    }
    kept = algorithms.rollout_correction(**inputs, rollout_rs="token_k1", rollout_rs_threshold="0.8_1.2").response_mask
    assert kept.tolist() == [[0.0, 1.0]]


def test_runaway_ratios_and_filler_stay_finite() -> None:
    inputs = case()
    hole = inputs["response_mask"] == 0
    inputs["log_probs"] = inputs["log_probs"].masked_fill(hole, torch.nan)
    inputs["log_probs"][inputs["response_mask"] == 1] += 500.0
    correction = algorithms.rollout_correction(**inputs, rollout_is="sequence", rollout_is_threshold=1e9)
    assert correction.weights is not None and correction.weights.isfinite().all()
    metrics = algorithms.off_policy_metrics(**inputs)
    assert all(torch.tensor(value).isfinite() for key, value in metrics.items() if "ppl" not in key)


def test_a_batch_without_policy_tokens() -> None:
    inputs = case()
    inputs["response_mask"] = torch.zeros_like(inputs["response_mask"])
    correction = algorithms.rollout_correction(
        **inputs, rollout_is="token", rollout_is_batch_normalize=True, rollout_rs="seq_mean_k3", rollout_rs_threshold=1
    )
    assert correction.weights is not None and not correction.weights.any() and correction.metrics == {}
    assert algorithms.off_policy_metrics(**inputs) == {}


def test_mismatch_of_the_sampled_tokens() -> None:
    train, rollout = torch.tensor([[0.5, 0.25, 0.9]]).log(), torch.tensor([[0.4, 0.30, 0.1]]).log()
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    metrics = algorithms.mismatch_sums(train, rollout, mask, num_tokens=4.0)  # the other half lies in another part
    assert metrics["training/rollout_probs_diff_mean"].item() == pytest.approx(0.15 / 4)
    assert metrics["training/rollout_probs_diff_max"].item() == pytest.approx(0.1)
    log_gaps = (train - rollout).abs()[0, :2]
    assert metrics["training/rollout_log_probs_diff_mean"].item() == pytest.approx(log_gaps.sum().item() / 4)
    assert metrics["training/rollout_log_probs_diff_max"].item() == pytest.approx(log_gaps.max().item())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_is": "tokens"}, "did you mean token"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_0.5"}, "positive and in order"),
        ({"rollout_is": "token", "rollout_is_threshold": "high"}, "give an upper bound"),
        ({"rollout_rs": "token_k1"}, "needs rollout_rs_threshold"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}, "needs two bounds"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "0.5_2.0"}, "takes one upper bound"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1.0}, "did you mean token_k"),
        ({"rollout_rs": "token_k2,token_k3", "rollout_rs_threshold": "1,2,3"}, "names 2 options"),
    ],
)
def test_mistakes_are_named(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        algorithms.rollout_correction(**case(), **options)
