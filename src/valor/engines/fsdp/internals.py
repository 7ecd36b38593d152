"""What Valor needs of torch's FSDP2 beyond its public interface, in one place."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def drop_unreduced_gradients(part: FSDPModule) -> None:
    """Forget the gradients of whole parameters, which a backward pass left before they were reduced."""
    group = part._get_fsdp_state()._fsdp_param_group
    for held in group.fsdp_params if group else ():
        held.unsharded_accumulated_grad = None
        if hasattr(held, "_unsharded_param"):
            held._unsharded_param.grad = None


@contextmanager
def hooks_off(part: FSDPModule) -> Iterator[None]:
    """No hooks around the forward pass of `part` inside."""
    module = cast(nn.Module, part)
    before, after = module._forward_pre_hooks, module._forward_hooks
    module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        module._forward_pre_hooks, module._forward_hooks = before, after


class ReduceInPlace:
    """FSDP's reduce-scatter for a group of one: the buffer that it fills with gradients is also the result.

    FSDP asks for an input, fills it, asks for an output of the same size and copies; with one tensor for both the copy
    does nothing, which saves a pass over all gradients and their memory.
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        given, self._input = self._input, None
        if given is not None and tuple(given.shape) == tuple(size) and given.dtype == dtype:
            return given
        self._input = torch.empty(*size, dtype=dtype, device=device)
        return self._input

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(input_tensor)
