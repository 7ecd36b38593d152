"""Masked reductions: empty masks, filler at masked positions, gradients, large means."""

import math

import pytest
import torch

from valor import algorithms
from valor.algorithms.reductions import masked_moments
from valor.errors import UserError

X = torch.tensor([[1.0, math.nan, 3.0], [math.inf, 5.0, -math.inf]])
MASK = torch.tensor([[1.0, 0, 1], [0, 1, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_filler_never_counts(dtype: torch.dtype) -> None:
    mask = MASK.to(dtype)
    assert algorithms.masked_sum(X, mask).item() == 9.0
    assert algorithms.masked_mean(X, mask).item() == 3.0
    assert algorithms.masked_var(X, mask).item() == pytest.approx(4.0)
    assert algorithms.masked_var(X, mask, unbiased=False).item() == pytest.approx(8 / 3)
    assert algorithms.masked_mean(X, mask, dim=-1).tolist() == [2.0, 5.0]
    assert algorithms.masked_count(mask).item() == 3.0
    whitened = algorithms.masked_whiten(X, mask)
    torch.testing.assert_close(whitened, torch.tensor([[-1.0, 0, 0], [0, 1.0, 0]]))


def test_filler_never_reaches_the_gradient() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    algorithms.masked_mean(x / MASK, MASK).backward()  # 0/0 where the mask is 0
    assert x.grad is not None
    torch.testing.assert_close(x.grad[MASK == 1], torch.full((3,), 1 / 3))


def test_nothing_to_reduce_gives_zero() -> None:
    empty = torch.zeros_like(MASK)
    assert algorithms.masked_mean(X, empty).item() == 0.0
    assert algorithms.masked_var(X, empty).item() == 0.0
    assert not algorithms.masked_whiten(X, empty).any()
    one = torch.tensor([[1.0, 0, 0], [0, 0, 0]])
    assert not algorithms.masked_whiten(X, one).any() and algorithms.masked_var(X, one).item() == 0.0
    for mode in algorithms.LOSS_AGG_MODES:
        x = torch.ones(2, 3, requires_grad=True)
        loss = algorithms.aggregate_loss(x, empty, mode)
        loss.backward()
        assert loss.item() == 0.0 and x.grad is not None and not x.grad.any()
        assert algorithms.aggregate_loss(torch.ones(0, 3), torch.ones(0, 3), mode).item() == 0.0


def test_whitening_keeps_its_precision_far_from_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 1000.0 + torch.randn(64, 128, generator=generator)
    ones = torch.ones_like(x)
    reference = (x.double() - x.double().mean()) / x.double().std()
    torch.testing.assert_close(algorithms.masked_whiten(x, ones).double(), reference, atol=2e-4, rtol=1e-4)


def test_moments_are_those_of_the_masked_in_entries() -> None:
    generator = torch.Generator().manual_seed(1)
    x, mask = torch.randn(30, 20, generator=generator) * 3 + 5, (torch.rand(30, 20, generator=generator) > 0.5).float()
    mask[4:8] = 0
    (count, mean, squares), chosen = masked_moments(x, mask), x[mask == 1].double()
    assert count == len(chosen)
    assert mean == pytest.approx(chosen.mean().item())
    assert squares == pytest.approx((chosen - chosen.mean()).square().sum().item())
    whitened = algorithms.masked_whiten(x, mask)
    torch.testing.assert_close(
        whitened[mask == 1].double(), (chosen - chosen.mean()) / chosen.std(), atol=1e-5, rtol=1e-5
    )


def test_fully_masked_rows_count_only_in_a_global_denominator() -> None:
    loss, mask = torch.ones(3, 2), torch.tensor([[1.0, 1], [1, 0], [0, 0]])
    assert algorithms.aggregate_loss(loss, mask, "seq-mean-token-sum").item() == pytest.approx(1.5)
    assert algorithms.aggregate_loss(loss, mask, "seq-mean-token-sum", denominator=3).item() == pytest.approx(1.0)
    assert algorithms.aggregate_loss(loss, mask, "seq-mean-token-mean", denominator=3).item() == pytest.approx(2 / 3)


def test_unknown_names_are_corrected() -> None:
    with pytest.raises(UserError, match="did you mean seq-mean-token-sum"):
        algorithms.aggregate_loss(X, MASK, "seq-mean-tokensum")
    with pytest.raises(UserError, match="known: batch, none"):
        algorithms.masked_whiten(X, MASK, scope="row")
