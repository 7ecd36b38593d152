"""Out of memory inside a pass: all ranks give the pass up together, and FSDP is ready for the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from valor.engines.distributed import max_over_ranks
from valor.errors import TrainingStopped

_Result = TypeVar("_Result")


class Recovery:
    """Runs passes of the sharded modules `parts`, given in the order in which a forward pass enters them, root first.

    A rank that runs out of memory in a forward pass serves the gathers that the others still wait for, then all drop
    the pass. In a backward pass of several ranks there is no way to go on: the others wait for gradients.
    """

    def __init__(self, parts: Sequence[FSDPModule]) -> None:
        self._parts = parts
        self._entered = 0
        self.failed_here = False
        if dist.get_world_size() > 1:
            for part in parts:  # after FSDP's own hook: what is entered has been gathered
                cast(nn.Module, part).register_forward_pre_hook(self._enter)

    def _enter(self, *_: Any) -> None:
        self._entered += 1

    def forward(self, function: Callable[[], _Result], *, recoverable: bool = True) -> _Result | None:
        """What `function`, which calls the root once, returns; None on all ranks where one of them lacked memory for
        it, and `failed_here` tells which. TrainingStopped instead where the pass is not recoverable.
        """
        self._entered, self.failed_here = 0, False
        result: _Result | None = None
        try:
            result = function()
        except torch.OutOfMemoryError as error:
            if not recoverable:
                raise _stopped("a pass with an exact KL or sequence parallelism") from error
            self.failed_here = True
        if self.failed_here:  # only now are the pass's tensors free: the exception had held on to them
            self._release()
            for part in self._parts[self._entered :]:
                part.unshard()
                part.reshard()
        if max_over_ranks(int(self.failed_here)):
            result = None
            self._parts[0].reset_iter_state()
        return result

    def backward(self, loss: Tensor) -> bool:
        """Whether there was memory for it; if not, the gradients are whatever was there when it ended.

        TrainingStopped with several ranks.
        """
        try:
            loss.backward()
        except torch.OutOfMemoryError as error:
            if dist.get_world_size() > 1:
                raise _stopped("a backward pass") from error
        else:
            return True
        self._release()
        self._parts[0].reset_iter_state()
        return False

    def restore_gradients(self, earlier: Mapping[nn.Parameter, Tensor]) -> None:
        """Drop all gradients, also those that FSDP has not reduced yet, but for the `earlier` ones."""
        for part in self._parts:
            group = part._get_fsdp_state()._fsdp_param_group
            for held in group.fsdp_params if group else ():
                held.unsharded_accumulated_grad = None
                if hasattr(held, "_unsharded_param"):
                    held._unsharded_param.grad = None
        for parameter in cast(nn.Module, self._parts[0]).parameters():
            parameter.grad = earlier.get(parameter)

    def _release(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _stopped(where: str) -> TrainingStopped:
    return TrainingStopped(
        f"out of memory in {where}, which several processes cannot repeat: lower ppo_max_token_len_per_gpu, or set "
        "model.enable_gradient_checkpointing=true"
    )
