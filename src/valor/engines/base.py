"""What a training engine is: the interface that workers call, whichever backend holds the model.

An engine holds one model on this rank. Ranks that compute one share of a batch together (model parallelism) have one
data-parallel rank: they are given the same rows and answer alike. Every method is collective: all ranks call it, also
one whose share of the batch is empty.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from valor.data.batch import Batch
from valor.models.policy import Reference

Limit = int | None
LossFn = Callable[[dict[str, Tensor], Batch], tuple[Tensor, Mapping[str, Any]]]

WeightNames = Literal["module", "checkpoint"]
"""Names of the transformers module, or those of a checkpoint on the hub, which may cut a tensor into several."""


class TrainingEngine(Protocol):
    """Trains, or only evaluates, one PolicyModel, ValueModel or RewardModel."""

    device: torch.device
    data_parallel_rank: int

    @property
    def version(self) -> int:
        """Number of updates that the weights have had."""
        ...

    def forward(
        self, batch: Batch, *, max_tokens: Limit = None, max_rows: Limit = None, **options: Any
    ) -> dict[str, Tensor]:
        """The model's outputs [B, T] (or [B], or [B, T, K]) for these rows, without gradients, on their device.

        A micro-batch holds at most `max_tokens` tokens (prompt, response and padding) and `max_rows` rows. `options`
        go to the model's forward (temperature, with_entropy, …).
        """
        ...

    def forward_backward(
        self, batch: Batch, loss_fn: LossFn, *, max_tokens: Limit = None, max_rows: Limit = None, **options: Any
    ) -> dict[str, float]:
        """Add the gradients of these rows; returns their metrics, which add up over data-parallel ranks.

        `loss_fn(outputs, micro)` sees the model's outputs of a micro-batch and the rows they belong to, and returns a
        loss that is already divided by the global denominators, with metrics to match. Gradients over micro-batches
        and ranks add up, so neither their number nor their sizes matter.
        """
        ...

    def optimizer_step(self, *, advance_schedule: bool = True) -> dict[str, float]:
        """Clip, update, drop the gradients; `grad_norm` (before clipping), `lr`, `skipped` (0 or 1).

        A norm that is not finite skips the update on every rank. The learning-rate schedule moves on in either case,
        unless `advance_schedule` is false (several updates that share one rate). Diverged: the update has made the
        weights useless, so that they may be neither saved nor sent anywhere.
        """
        ...

    def named_weights(self, names: WeightNames) -> Iterator[tuple[str, Tensor]]:
        """All weights, unsharded, one after another, adapters merged, tied tensors once."""
        ...

    @property
    def generation_module(self) -> nn.Module | None:
        """The transformers model to generate with inside `unsharded`; None where a rank holds only parts of layers."""
        ...

    def unsharded(self) -> AbstractContextManager[Any]:
        """All parameters unsharded, in the computing dtype. Inside, any part of the model may be called, without
        gradients; no other method of the engine, and weights may not be changed."""
        ...

    def reference(self) -> AbstractContextManager[Reference]:
        """This policy as the reference of the exact KL, to be called inside the passes of the engine that trains.

        A policy with adapters is a reference without them, inside its own passes.
        """
        ...

    def without_adapters(self) -> AbstractContextManager[None]:
        """The model computes as its base inside."""
        ...

    @property
    def checkpoint_bytes(self) -> int:
        """How large what `save` writes will be, over all ranks."""
        ...

    def save(self, path: Path) -> None:
        """Write weights, optimizer and counters into the directory `path`, and what the model is beside them. Diverged:
        some of these numbers are not finite."""
        ...

    def load(self, path: Path) -> None:
        """Read what `save` wrote, at this or another world size. UserError if it does not fit."""
        ...

    def export(self, path: Path) -> None:
        """Write a plain Hugging Face directory."""
        ...

    def offload(self) -> None:
        """Move to host memory what the configuration keeps there between phases: weights, optimizer state."""
        ...

    def onload(self, *, optimizer: bool = True) -> None:
        """Bring it back to the device; needed before any other method. optimizer: its state too."""
        ...


BuildEngine = Callable[..., TrainingEngine]
"""`build(section, model, load, *, device, total_steps, trainable)`: an engine for `model` under a role's settings.

`section` is the role's configuration (actor, critic, ref, …), `model` its BackboneConfig; `load(dtype=…)` reads the
module on the CPU; `total_steps` is the length of the learning-rate schedule; trainable: with the section's `optim`.
"""
