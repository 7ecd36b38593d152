import pytest
import torch
from torch import nn

from valor.rollout.native.decoder import packed_linears


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_packed_layers_compute_the_same(dtype: torch.dtype, tolerance: float, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(512, 600, bias=bias).to(dtype)
    weight = layer.weight.clone()
    for shape in [(1, 512), (64, 1, 512), (3, 200, 512)]:
        inputs = torch.randn(shape).to(dtype)
        plain = layer(inputs)
        with packed_linears(layer):
            assert "forward" in layer.__dict__
            packed = layer(inputs)
            with torch.no_grad():
                layer.weight.zero_()  # the packed copy is a copy: what computes is not the parameter any more
            assert torch.equal(layer(inputs), packed)
            layer.weight.copy_(weight)
        assert packed.shape == plain.shape and packed.dtype == dtype
        assert torch.allclose(packed, plain, atol=tolerance, rtol=tolerance)


def test_layers_are_restored_after_an_error() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(KeyError), packed_linears(layer):
        raise KeyError
    assert "forward" not in layer.__dict__
    assert layer(torch.zeros(1, 4)).requires_grad


def test_layers_of_their_own_kind_are_left_alone() -> None:
    model = nn.Sequential(Doubled(4, 4), nn.Linear(4, 4).double(), nn.Embedding(4, 4))
    with packed_linears(model):
        assert all("forward" not in module.__dict__ for module in model)
