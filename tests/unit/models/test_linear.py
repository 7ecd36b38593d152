import pytest
import torch
from torch import nn

from valor.models import linear
from valor.rollout.native.decoder import packed_linears


@pytest.fixture(autouse=True)
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "bfloat16_is_slow", lambda: True)


def copies(bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain, other = nn.Linear(48, 40, bias=bias), nn.Linear(48, 40, bias=bias)
    other.load_state_dict(plain.state_dict())
    linear.compute_in_float32(other)
    return plain, other


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64, 48), (3, 5, 48)])
def test_bfloat16_is_float32_rounded_once(shape: tuple[int, ...], bias: bool) -> None:
    """Values and gradients are those of float32 layers on the same numbers, rounded: to the bit, in one thread."""
    plain, other = (layer.bfloat16() for layer in copies(bias))
    plain.float()
    x, grad = torch.randn(shape).bfloat16(), torch.randn(*shape[:-1], 40).bfloat16()
    inputs = [x.float().requires_grad_(), x.clone().requires_grad_()]
    outputs = [layer(one) for layer, one in zip((plain, other), inputs, strict=True)]
    assert type(outputs[1].grad_fn).__name__ == "_LinearBackward", "it took another path"
    assert torch.equal(outputs[1], outputs[0].bfloat16())
    outputs[0].backward(grad.float())
    outputs[1].backward(grad)
    assert inputs[0].grad is not None and inputs[1].grad is not None
    assert torch.equal(inputs[1].grad, inputs[0].grad.bfloat16())
    assert other.weight.grad is not None and plain.weight.grad is not None
    assert torch.equal(other.weight.grad, plain.weight.grad.bfloat16())
    if other.bias is not None and other.bias.grad is not None and plain.bias.grad is not None:
        torch.testing.assert_close(other.bias.grad, plain.bias.grad.bfloat16(), rtol=2**-8, atol=2**-6)


def test_frozen_weights_get_no_gradient() -> None:
    _, other = copies()
    other.bfloat16().requires_grad_(False)
    x = torch.randn(640, 48).bfloat16().requires_grad_()
    other(x).sum().backward()
    assert other.weight.grad is None and x.grad is not None


def test_few_rows_and_other_numbers_go_through_torch() -> None:
    plain, other = copies()
    x = torch.randn(64, 48)
    assert torch.equal(other(x), plain(x))
    with torch.autocast("cpu"):
        assert other(x).dtype is torch.bfloat16
    assert type(other.bfloat16()(torch.randn(7, 48).bfloat16()).grad_fn).__name__ == "AddmmBackward0"


@pytest.mark.parametrize("rows", [700, 5])
def test_products_of_any_number_of_rows(rows: int) -> None:
    x, grad, weight = torch.randn(rows, 48), torch.randn(rows, 40), torch.randn(40, 48)
    assert torch.equal(linear.product(x, weight), nn.functional.linear(x, weight))
    assert torch.equal(linear.weight_gradient(grad, x), grad.t() @ x)
    x, grad, weight = x.bfloat16(), grad.bfloat16(), weight.bfloat16()
    torch.testing.assert_close(linear.product(x, weight).float(), x.float() @ weight.float().t(), rtol=0.02, atol=0.1)
    found = linear.weight_gradient(grad, x).float()
    torch.testing.assert_close(found, grad.float().t() @ x.float(), rtol=0.02, atol=0.1)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generation_packs_such_layers_and_gives_them_back(dtype: torch.dtype) -> None:
    plain, layer = (layer.to(dtype) for layer in copies())
    forward = vars(layer)["forward"]
    with torch.inference_mode(), packed_linears(layer):
        assert vars(layer)["forward"] is not forward
        x = torch.randn(5, 48).to(dtype)
        torch.testing.assert_close(layer(x), plain(x), rtol=0.02, atol=0.02)
    assert vars(layer)["forward"] is forward
