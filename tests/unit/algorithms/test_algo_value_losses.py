"""Value losses against finite differences and closed forms."""

import math

import pytest
import torch

from valor import algorithms
from valor.algorithms.value_losses import hl_gauss_target
from valor.errors import UserError


def case(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(4, 6, generator=generator) > 0.3).double()
    return {
        "values": torch.randn(4, 6, generator=generator, dtype=torch.float64),
        "old_values": torch.randn(4, 6, generator=generator, dtype=torch.float64),
        "returns": torch.rand(4, 6, generator=generator, dtype=torch.float64),
        "response_mask": mask,
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mse", {}),
        ("mse", {"cliprange_value": None}),
        ("huber", {"huber_delta": 0.5}),
        ("huber", {"cliprange_value": None}),
        ("bce", {}),
        ("hl_gauss", {}),
    ],
)
def test_gradient_equals_finite_differences(name: str, options: dict) -> None:
    inputs = case()
    if name == "hl_gauss":
        inputs = {key: value[:1] for key, value in inputs.items()}
        inputs["values"] = torch.randn(1, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(values: torch.Tensor) -> torch.Tensor:
        return algorithms.value_loss(name, **{**inputs, "values": values}, **options)[0]

    values = inputs["values"].clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (values,), eps=1e-6, atol=1e-6)
    loss(values).backward()
    assert values.grad is not None and not values.grad[inputs["response_mask"] == 0].any()
    assert values.grad.abs().sum() > 0


def test_without_clipping_it_is_half_the_squared_error() -> None:
    inputs = case()
    loss, metrics = algorithms.value_loss(**inputs, cliprange_value=None)
    mask = inputs["response_mask"]
    error = (inputs["values"] - inputs["returns"]) * mask
    assert loss.item() == pytest.approx(0.5 * error.square().sum().item() / mask.sum().item())
    assert metrics["vf_clipfrac"].item() == 0.0
    assert metrics["vf_error_mean"].item() == pytest.approx(error.sum().item() / mask.sum().item())


def test_huber_is_linear_beyond_delta() -> None:
    inputs = {"values": torch.tensor([[0.3, 5.0]]), "returns": torch.zeros(1, 2), "response_mask": torch.ones(1, 2)}
    loss, _ = algorithms.value_loss("huber", **inputs, cliprange_value=None, huber_delta=0.5, loss_agg_mode="token-sum")
    assert loss.item() == pytest.approx(0.5 * 0.09 + 0.5 * (5.0 - 0.25))


def test_bce_is_least_at_the_return_and_predicts_its_sigmoid() -> None:
    inputs = {"returns": torch.tensor([[0.25, 1.3]]), "response_mask": torch.ones(1, 2)}
    logits = torch.tensor([[math.log(1 / 3), 2.0]], requires_grad=True)
    loss, metrics = algorithms.value_loss("bce", values=logits, **inputs)
    loss.backward()
    assert logits.grad is not None and logits.grad[0, 0].item() == pytest.approx(0.0, abs=1e-7)
    assert logits.grad[0, 1].item() == pytest.approx((torch.sigmoid(torch.tensor(2.0)).item() - 1.0) / 2)
    assert metrics["vpred_mean"].item() == pytest.approx((0.25 + torch.sigmoid(torch.tensor(2.0)).item()) / 2)


def test_hl_gauss_target_has_the_return_as_its_mean() -> None:
    returns = torch.tensor([0.3, 0.5, 0.71])
    target = hl_gauss_target(returns, num_bins=50, value_min=0.0, value_max=1.0)
    torch.testing.assert_close(target.sum(-1), torch.ones(3))
    torch.testing.assert_close(algorithms.hl_gauss_value(target.log()), returns, atol=1e-4, rtol=0.0)
    edge = hl_gauss_target(torch.tensor([7.0]), 4, 0.0, 1.0)
    assert edge.argmax().item() == 3


def test_hl_gauss_checks_the_number_of_bins_it_is_told() -> None:
    inputs = {"values": torch.zeros(1, 1, 5), "returns": torch.ones(1, 1), "response_mask": torch.ones(1, 1)}
    assert algorithms.value_loss("hl_gauss", **inputs, num_bins=5)[0].item() == pytest.approx(math.log(5))
    with pytest.raises(UserError, match="6 bins got logits of 5"):
        algorithms.value_loss("hl_gauss", **inputs, num_bins=6)


def test_parts_add_up_and_an_empty_mask_is_zero() -> None:
    inputs = case()
    mask = inputs["response_mask"]
    whole, metrics = algorithms.value_loss(**inputs)
    parts = [
        algorithms.value_loss(**{k: v[rows] for k, v in inputs.items()}, num_tokens=mask.sum(), num_sequences=4)
        for rows in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    for key, value in metrics.items():
        assert sum(part[key].item() for _, part in parts) == pytest.approx(value.item(), abs=1e-6), key
    empty, _ = algorithms.value_loss(**{**inputs, "response_mask": torch.zeros_like(mask)})
    assert empty.item() == 0.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mse", {"old_values": None}, "needs old_values"),
        ("msee", {}, "did you mean mse"),
        ("huber", {"huber_delta": 0.0}, "must be positive"),
        ("mse", {"huber_delta": 1.0}, "unknown option of mse"),
    ],
)
def test_mistakes_are_named(name: str, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        algorithms.value_loss(name, **{**case(), **options})


def test_the_mean_of_a_distribution_over_bins() -> None:
    bins = torch.tensor([[[0.0, 50.0], [50.0, 0.0], [1.0, 1.0]]])
    predicted = algorithms.hl_gauss_value(bins, value_min=-1.0, value_max=1.0)
    torch.testing.assert_close(predicted, torch.tensor([[0.5, -0.5, 0.0]]))
