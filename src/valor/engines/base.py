"""Training engines: the interface that workers call, and what all backends do alike.

An engine holds one model on this rank. Ranks that compute one share of a batch together (model parallelism) have one
data-parallel rank: they get the same rows and answer alike. Every method is collective: all ranks call it, also one
whose share of the batch is empty.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from valor.config.engine import OptimConfig
from valor.data.batch import Batch
from valor.engines.checkpoint import Counters
from valor.engines.microbatch import MicroBatches, RowOrder, TokenBudget
from valor.engines.optim import lr_factor
from valor.errors import Diverged
from valor.models.export import export_hf, plain_weights, published_weights
from valor.models.policy import Reference
from valor.models.rows import ROW_FIELDS, model_rows

Limit = int | None
LossFn = Callable[[dict[str, Tensor], Batch], tuple[Tensor, Mapping[str, Any]]]

WeightNames = Literal["module", "checkpoint"]
"""Names of the transformers module, or those of a checkpoint on the hub, which may cut a tensor into several."""

_EXPLODED = 100.0  # times the norm of the weights as they were loaded


class TrainingEngine(ABC):
    """Trains, or only evaluates, one PolicyModel, ValueModel or RewardModel.

    `module` is the model as transformers has it: its names, config and layout of rows, whoever holds the weights.
    """

    data_parallel_rank: int

    def __init__(self, module: Any, optim: OptimConfig | None, device: torch.device, total_steps: int) -> None:
        self.module, self.optim, self.device, self.total_steps = module, optim, device, total_steps
        self.optimizer: Any = None
        self.counters = Counters()
        self._first_norm = 0.0
        self._budgets = {"forward": TokenBudget(), "train": TokenBudget()}

    @property
    def version(self) -> int:
        """Number of updates that the weights have had."""
        return self.counters.updates

    @abstractmethod
    def forward(
        self, batch: Batch, *, max_tokens: Limit = None, max_rows: Limit = None, **options: Any
    ) -> dict[str, Tensor]:
        """The model's outputs [B, T] (or [B], or [B, T, K]) for these rows, without gradients, on their device.

        A micro-batch holds at most `max_tokens` tokens (prompt, response and padding) and `max_rows` rows. `options`
        go to the model's forward (temperature, with_entropy, …).
        """

    @abstractmethod
    def forward_backward(
        self, batch: Batch, loss_fn: LossFn, *, max_tokens: Limit = None, max_rows: Limit = None, **options: Any
    ) -> dict[str, float]:
        """Add the gradients of these rows; returns their metrics, which add up over data-parallel ranks.

        `loss_fn(outputs, micro)` sees the model's outputs of a micro-batch and the rows they belong to, and returns a
        loss that is already divided by the global denominators, with metrics to match. Gradients over micro-batches
        and ranks add up, so neither their number nor their sizes matter.
        """

    def optimizer_step(self, *, advance_schedule: bool = True, learns: bool = True) -> dict[str, float]:
        """Clip, update, drop the gradients; `grad_norm` (before clipping), `lr`, `skipped` (0 or 1).

        A norm that is not finite skips the update on every rank. Without `learns` there was no token to learn from:
        weights and moments stay, which a gradient of 0 would move. The learning-rate schedule moves on in either case,
        unless `advance_schedule` is false (several updates that share one rate). Diverged: the update has made the
        weights useless, so that they may be neither saved nor sent anywhere.
        """
        assert self.optimizer is not None and self.optim is not None, "a frozen engine has no optimizer"
        lr = self.optim.lr * lr_factor(self.counters.schedule_steps, self.optim, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm, grads = self._gradients()
        finite = math.isfinite(norm)
        if finite and learns:
            if self.optim.clip_grad is not None and norm > self.optim.clip_grad:
                for grad in grads:
                    grad.mul_(self.optim.clip_grad / norm)
            self._apply_update()
            self.counters.updates += 1
            weights = self._weight_norm()
            if not weights <= _EXPLODED * max(self._first_norm, 1.0):
                raise Diverged(
                    f"an update has ruined the weights: their norm is {weights:g}, and was {self._first_norm:g} at the "
                    f"start (gradient norm {norm:g}, learning rate {lr:g}): lower the learning rate"
                )
        self.counters.skipped += not finite
        self._zero_gradients()
        if advance_schedule:
            self.counters.schedule_steps += 1
        return {"grad_norm": norm, "lr": lr, "skipped": float(not finite)}

    def named_weights(self, names: WeightNames) -> Iterator[tuple[str, Tensor]]:
        """All weights, unsharded, one after another, adapters merged, tied tensors once."""
        named = plain_weights if names == "module" else published_weights
        return named(self.module, self._unsharded_tensors())

    def state_dict(self) -> dict[str, Tensor]:
        """All weights, unsharded, under the names of `module`, on the CPU of rank 0; empty on the other ranks."""
        weights: dict[str, Tensor] = {}
        for name, value in self._unsharded_tensors():
            if dist.get_rank() == 0:
                weights[name] = value.detach().to("cpu", copy=True)
        return weights

    def export(self, path: Path) -> None:
        """Write a plain Hugging Face directory."""
        weights = self.state_dict()
        if dist.get_rank() == 0:
            export_hf(self.module, path, state_dict=weights)
        dist.barrier()

    @property
    @abstractmethod
    def generation_module(self) -> nn.Module | None:
        """The transformers model to generate with inside `unsharded`; None where a rank holds only parts of layers."""

    @abstractmethod
    def unsharded(self) -> AbstractContextManager[Any]:
        """All parameters unsharded, in the computing dtype. Inside, any part of the model may be called, without
        gradients; no other method of the engine, and weights may not be changed."""

    @abstractmethod
    def reference(self) -> AbstractContextManager[Reference]:
        """This policy as the reference of the exact KL, to be called inside the passes of the engine that trains.

        A policy with adapters is a reference without them, inside its own passes.
        """

    @abstractmethod
    def without_adapters(self) -> AbstractContextManager[None]:
        """The model computes as its base inside."""

    @property
    @abstractmethod
    def checkpoint_bytes(self) -> int:
        """How large what `save` writes will be, over all ranks."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write weights, optimizer and counters into the directory `path`, and what the model is beside them. Diverged:
        some of these numbers are not finite."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Read what `save` wrote, at this or another world size. UserError if it does not fit."""

    @abstractmethod
    def offload(self) -> None:
        """Move to host memory what the configuration keeps there between phases: weights, optimizer state."""

    @abstractmethod
    def onload(self, *, optimizer: bool = True) -> None:
        """Bring it back to the device; needed before any other method. optimizer: its state too."""

    def _micro_batches(
        self, verb: str, batch: Batch, max_tokens: Limit, max_rows: Limit, *, share: int = 1
    ) -> MicroBatches:
        """share: processes of which each computes that part of every micro-batch."""
        lengths = (batch["prompt_lengths"] + batch["response_lengths"]).tolist()
        max_tokens, max_rows = (None if limit is None else limit * share for limit in (max_tokens, max_rows))
        packed, shared = getattr(self.module, "packed", False), lengths and getattr(self.module, "shared", False)
        order = RowOrder(*self.module.in_families(batch)) if shared else RowOrder.by_length(lengths)
        limits = {"max_tokens": max_tokens, "max_rows": max_rows}
        return MicroBatches(lengths, order, self._budgets[verb], **limits, packed=packed)

    def _loss(
        self, outputs: dict[str, Tensor], batch: Batch, indices: list[int], loss_fn: LossFn
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """Loss and metrics of some rows; of none, a zero that depends on every output."""
        if not indices:  # this rank has run out of rows; the others need its part of every gather and reduction
            return torch.stack([value.sum() for value in outputs.values()]).sum() * 0.0, {}
        loss, values = loss_fn(outputs, batch.take(indices).to(self.device))
        return loss, {name: x.detach() if isinstance(x, Tensor) else x for name, x in values.items()}

    def _numbers(self, parts: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
        """Metrics of micro-batches in one copy from the device, for when all their passes have been launched."""
        far = [x for values in parts for x in values.values() if isinstance(x, Tensor) and x.device.type != "cpu"]
        numbers = iter(torch.stack([x.double() for x in far]).tolist() if far else ())
        known = {id(x): number for x, number in zip(far, numbers, strict=True)}
        return [{name: known[id(x)] if id(x) in known else float(x) for name, x in values.items()} for values in parts]

    @abstractmethod
    def _gradients(self) -> tuple[float, list[Tensor]]:
        """Their norm, the same on every rank, and this rank's parts of them."""

    @abstractmethod
    def _apply_update(self) -> None: ...

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    @abstractmethod
    def _weight_norm(self) -> float:
        """The norm of all weights that are trained; 0 where none are."""

    @abstractmethod
    def _unsharded_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer of the state dict, unsharded, one at a time, on the engine's device."""


BuildEngine = Callable[..., TrainingEngine]
"""`build(section, model, load, *, device, total_steps, trainable)`: an engine for `model` under a role's settings.

`section` is the role's configuration (actor, critic, ref, …), `model` its BackboneConfig; `load(dtype=…)` reads the
module on the CPU; `total_steps` is the length of the learning-rate schedule; trainable: with the section's `optim`.
"""


def rows_of(batch: Batch, indices: list[int]) -> Batch:
    """These rows as a model reads them; of none, a row of one token.

    A Batch, which FSDP leaves where it is: rows are put together on the CPU, then moved.
    """
    if indices:
        return model_rows(batch.take(indices))
    token, length = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, dtype=torch.long)
    return Batch(dict(zip(ROW_FIELDS, (token, length, token, length), strict=True)))


def collect(outputs: dict[str, Tensor], some: Mapping[str, Tensor], indices: list[int], responses: Tensor) -> None:
    """Put the outputs of some rows into those of all rows, which are made on the device of `responses` [B, T]."""
    for name, value in some.items():
        if name not in outputs:
            shape = (*responses.shape[: value.dim()], *value.shape[2:])
            outputs[name] = torch.zeros(shape, dtype=value.dtype, device=responses.device)
        if indices:
            outputs[name][indices] = value.to(responses.device)


@contextmanager
def deterministic_backward() -> Iterator[None]:
    """Where deterministic algorithms are set to warn only, they are required inside: flash attention would otherwise
    sum gradients in any order."""
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if warns:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if warns:
            torch.use_deterministic_algorithms(True, warn_only=True)
