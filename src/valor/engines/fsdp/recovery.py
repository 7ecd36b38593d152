"""Out of memory inside a pass: all ranks give the pass up together, and FSDP is ready for the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from valor.engines.distributed import max_over_ranks
from valor.engines.fsdp.internals import drop_unreduced_gradients, note_collectives
from valor.errors import TrainingStopped

_Result = TypeVar("_Result")


class Recovery:
    """Runs passes of the sharded modules `parts`, given in the order in which a forward pass enters them, root first.

    A rank that runs out of memory serves the gathers and reductions that the others still wait for, then all drop the
    pass. Every backward pass has the same ones in the same order, whatever rows it is of (ranks that have run out of
    rows could not take part otherwise); `rehearse` learns them.
    """

    def __init__(self, parts: Sequence[FSDPModule]) -> None:
        self._parts = parts
        self._entered = 0
        self.failed_here = False
        self._issued: list[Callable[[], None]] = []  # collectives of this pass, to be repeated with zeros
        self._due: list[Callable[[], None]] | None = None  # those of a backward pass, once they are known
        if dist.get_world_size() > 1:
            for part in parts:  # after FSDP's own hook: what is entered has been gathered
                cast(nn.Module, part).register_forward_pre_hook(self._enter)
                note_collectives(part, self._issued)

    def _enter(self, *_: Any) -> None:
        self._entered += 1

    def forward(self, function: Callable[[], _Result], *, recoverable: bool = True) -> _Result | None:
        """What `function`, which calls the root once, returns; None on all ranks where one of them lacked memory for
        it, and `failed_here` tells which. TrainingStopped instead where the pass is not recoverable.
        """
        self._entered, self.failed_here = 0, False
        self._issued.clear()
        result: _Result | None = None
        try:
            result = function()
        except torch.OutOfMemoryError as error:
            if not recoverable:
                raise _stopped("a pass with an exact KL, sequence or tensor parallelism") from error
            self.failed_here = True
        if self.failed_here:  # only now are the pass's tensors free: the exception had held on to them
            _free_cached_memory()
            for part in self._parts[self._entered :]:
                part.unshard()
                part.reshard()
        if max_over_ranks(int(self.failed_here)):
            result = None
            self._parts[0].reset_iter_state()
        return result

    @property
    def to_rehearse(self) -> bool:
        """Whether `rehearse` is to be called before the first backward pass; not where FSDP, or something beside it,
        reduces in other ways too."""
        if dist.get_world_size() == 1 or self._due is not None:
            return False
        parameters = cast(nn.Module, self._parts[0]).parameters()
        return all(cast(DTensor, parameter).device_mesh.ndim == 1 for parameter in parameters)

    def rehearse(self, loss: Tensor) -> None:
        """A backward pass, of as few rows as there may be; its gradients are of no use."""
        self._issued.clear()
        loss.backward()
        self._due = list(self._issued)

    def backward(self, loss: Tensor) -> bool:
        """Whether all ranks had memory for it; if not, `failed_here` tells which had not, and the gradients are
        whatever was there when it ended. TrainingStopped with several ranks that have not rehearsed.
        """
        self._issued.clear()
        self.failed_here = False
        try:
            loss.backward()
        except torch.OutOfMemoryError as error:
            if dist.get_world_size() > 1 and self._due is None:
                raise _stopped("a backward pass with hybrid sharding, sequence or tensor parallelism") from error
            self.failed_here = True
        if self.failed_here:
            self._parts[0].reset_iter_state()
            _free_cached_memory()
            for repeat in (self._due or [])[len(self._issued) :]:
                repeat()
        return not max_over_ranks(int(self.failed_here))

    def restore_gradients(self, earlier: Mapping[nn.Parameter, Tensor]) -> None:
        """Drop all gradients, also those that FSDP has not reduced yet, but for the `earlier` ones."""
        for part in self._parts:
            drop_unreduced_gradients(part)
        for parameter in cast(nn.Module, self._parts[0]).parameters():
            parameter.grad = earlier.get(parameter)


def _free_cached_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _stopped(where: str) -> TrainingStopped:
    return TrainingStopped(
        f"out of memory in {where}, which several processes cannot repeat: lower ppo_max_token_len_per_gpu, or set "
        "model.enable_gradient_checkpointing=true"
    )
