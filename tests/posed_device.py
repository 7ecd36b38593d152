"""A device that is not there: tensors that say they are elsewhere, and count what a GPU would have to wait for.

A `Posed` tensor says that its device is "meta" and holds its numbers in a tensor on the CPU. Under a `PosedDevice`
every operation on such tensors is computed there. One that also reads a tensor of the host is an error, as on a GPU;
one that the host has to wait for is counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

DEVICE = torch.device("meta")
aten = torch.ops.aten

# Their results, or the sizes of their results, have to be known on the host.
_WAITING = {
    aten._local_scalar_dense.default,
    aten.item.default,  # which is not taken apart in inference mode, and neither is the next one
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.equal.default,
    aten.repeat_interleave.Tensor,
}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class Posed(Tensor):
    """`held`, a tensor on the CPU, as one on `DEVICE`."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Posed:
        found = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        found.held = held
        return found

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Posed({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PosedDevice.active.run(func, args, kwargs or {})


class PosedDevice(TorchDispatchMode):
    """Inside, `DEVICE` can be computed on. `waits` counts what the host had to wait for, by operation."""

    active: PosedDevice

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> PosedDevice:
        PosedDevice.active = self
        make = torch.tensor  # whose result would be without numbers, as "meta" is for torch
        self._patch = patch.object(torch, "tensor", lambda *a, device=None, **k: make(*a, **k).to(device or "cpu"))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        posed = [x for x in tensors if isinstance(x, Posed)]
        devices = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.device)]
        target = devices[0] if devices else None
        if func is aten._fused_sdp_choice.default:
            return 0  # the plain one
        if func is aten.copy_.default and 0 < len(posed) < len(tensors):
            if posed[0] is not args[0]:
                self.waits["copy to the host"] += 1
            args[0].held.copy_(args[1]) if posed[0] is args[0] else args[0].copy_(args[1].held)
            return args[0]
        here = bool(posed)
        if func.overloadpacket in (aten._to_copy, aten.to) and target is not None:
            here = target.type == DEVICE.type
            if posed and not here:
                self.waits["copy to the host"] += 1
        elif not posed and target is not None and target.type == DEVICE.type:
            here = True
        elif posed:
            foreign = [x for x in tensors if not isinstance(x, Posed) and x.dim() > 0]
            assert not foreign, f"{func} mixes devices"
            self._count(func, args)
        return self._compute(func, args, kwargs, here)

    def _count(self, func: Any, args: Any) -> None:
        if func in _INDEXING:
            indices = [x for x in pytree.tree_leaves(args[1]) if isinstance(x, Tensor)]
            self.waits["index by a mask"] += any(x.dtype is torch.bool for x in indices)
        elif func in _WAITING:
            self.waits[str(func)] += 1

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any], here: bool) -> Any:
        plain = pytree.tree_map_only(torch.device, lambda x: torch.device("cpu"), (args, kwargs))
        plain_args, plain_kwargs = pytree.tree_map_only(Posed, lambda x: x.held, plain)
        if func is aten.bmm.dtype:  # which a CPU does not have
            dtype = plain_args[2]
            out: Any = torch.bmm(plain_args[0].to(dtype), plain_args[1].to(dtype))
        else:
            out = func(*plain_args, **plain_kwargs)
        if not here:
            return out
        out = pytree.tree_map_only(Tensor, Posed, out)
        if func.overloadpacket is aten.to or not any(isinstance(x, Posed) for x in pytree.tree_leaves((args, kwargs))):
            return out
        return return_and_correct_aliasing(func, args, kwargs, out)


PosedDevice.active = PosedDevice()


def pose(module: nn.Module) -> nn.Module:
    """All parameters and buffers of `module` on `DEVICE`; tied ones stay tied."""
    moved: dict[int, Any] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(Posed(parameter.detach()), parameter.requires_grad)
                part._parameters[name] = moved[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = Posed(buffer)
    return module
