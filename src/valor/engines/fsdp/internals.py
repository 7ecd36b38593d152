"""What Valor needs of torch's FSDP2 beyond its public interface, in one place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def note_collectives(part: FSDPModule, issued: list[Callable[[], None]]) -> None:
    """From now on each gather and reduction of `part` appends a function to `issued` that repeats it with zeros."""
    group = part._get_fsdp_state()._fsdp_param_group
    if group is not None:
        part.set_custom_all_gather(_Noted(group._all_gather_comm, issued))  # type: ignore[arg-type]
        part.set_custom_reduce_scatter(_Noted(group._reduce_scatter_comm, issued))  # type: ignore[arg-type]


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


class _Noted:
    """A collective of FSDP that notes each call, with which tensors it was, as one that can be made again."""

    def __init__(self, collective: Any, issued: list[Callable[[], None]]) -> None:
        self._collective, self._issued = collective, issued
        self.allocate = collective.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **options: Any) -> Any:
        work = self._collective(output_tensor, input_tensor, group, **options)
        sizes, kind = (output_tensor.shape, input_tensor.shape), (output_tensor.dtype, output_tensor.device)
        self._issued.append(partial(self._repeat, sizes, kind, group, {**options, "async_op": False}))
        return work

    def _repeat(self, sizes: tuple[Any, Any], kind: tuple[Any, Any], group: Any, options: dict[str, Any]) -> None:
        output, input = (torch.zeros(size, dtype=kind[0], device=kind[1]) for size in sizes)
        self._collective(output, input, group, **options)


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
