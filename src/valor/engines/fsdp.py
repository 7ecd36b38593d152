"""The FSDP2 training engine: one sharded model behind a few verbs, the same code for one rank and for many."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from valor.config.engine import FSDPConfig, OptimConfig
from valor.data.batch import Batch
from valor.engines import checkpoint
from valor.engines.microbatch import MicroBatches, TokenBudget
from valor.engines.optim import build_optimizer, clip_gradients, lr_factor
from valor.engines.recovery import Recovery
from valor.engines.row_sharing import RowSharing, sequence_group
from valor.engines.sharding import gathered, rank_mesh, shard
from valor.models.export import export_hf
from valor.models.rows import FIELDS
from valor.tracking.metrics import reduce_metrics
from valor.tracking.progress import report_progress

LossFn = Callable[[dict[str, Tensor], Batch], tuple[Tensor, Mapping[str, Any]]]


class TrainEngine:
    """Trains (or, with `optim=None`, only evaluates) a PolicyModel or ValueModel on this rank's share of a batch.

    The process group exists before the engine (`distributed.init_process_group`). The weights are those of rank 0's
    `module`; elsewhere it may have none (`loading.built_once`). Every verb is collective: all ranks call it, also one
    whose share of the batch is empty.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        fsdp: FSDPConfig,
        optim: OptimConfig | None,
        device: torch.device,
        total_steps: int = 0,
        sequence_parallel: int = 1,
    ) -> None:
        if optim is None:
            module.requires_grad_(False)
        mesh = rank_mesh(device, fsdp)
        self.tensor_parallel = fsdp.tensor_parallel_size
        self._sequence_parallel = sequence_parallel
        self._sharing: RowSharing | None = None
        if self.tensor_parallel > 1:
            self._sharing = RowSharing(mesh.get_group("tp"))
        elif sequence_parallel > 1:
            self._sharing = RowSharing(sequence_group(module, sequence_parallel))
        self.module = module
        self.device = device
        self.total_steps = total_steps
        self._parts = shard(module, fsdp, device, mesh)
        self._host_resident = device.type == "cpu" or fsdp.offload_policy  # nothing to move between phases
        self._checkpointing = any(getattr(m, "gradient_checkpointing", False) for m in module.modules())
        self.optim = optim
        self.optimizer = build_optimizer(module.parameters(), optim) if optim is not None else None
        self.counters = checkpoint.Counters()
        self._recovery = Recovery(self._parts)
        self._budgets = {"forward": TokenBudget(), "train": TokenBudget()}

    # ---- forward and backward

    @torch.no_grad()
    def forward(
        self, batch: Batch, *, max_tokens: int | None = None, max_rows: int | None = None, **options: Any
    ) -> dict[str, Tensor]:
        """The model's outputs [B, T] (or [B], or [B, T, K]) for this rank's rows, in the given order, on their device.

        A micro-batch holds at most `max_tokens` tokens (prompt, response and padding) and `max_rows` rows. `options`
        go to the model's forward (temperature, with_entropy, …).
        """
        self.module.eval()
        if self._sharing:
            batch, own = self._sharing.gather(batch.select(FIELDS))
        else:
            own = slice(None)
        responses = batch["responses"]
        outputs: dict[str, Tensor] = {}
        todo = self._micro_batches("forward", batch, max_tokens, max_rows)
        while todo:
            indices = todo.present
            compute = partial(self._outputs, batch, indices, options)
            found = self._recovery.forward(compute, recoverable=self._recoverable(options))
            if found is None:
                todo.repeat(smaller=self._recovery.failed_here)
                continue
            for name, value in found.items():
                if name not in outputs:
                    shape = (*responses.shape[: value.dim()], *value.shape[2:])
                    outputs[name] = torch.zeros(shape, dtype=value.dtype, device=responses.device)
                if indices:
                    outputs[name][indices] = value.to(responses.device)
            todo.advance()
            report_progress(todo.done, len(batch))
        self._reshard()
        return {name: value[own] for name, value in outputs.items()}

    def forward_backward(
        self,
        batch: Batch,
        loss_fn: LossFn,
        *,
        max_tokens: int | None = None,
        max_rows: int | None = None,
        **options: Any,
    ) -> dict[str, float]:
        """Add the gradients of this rank's rows; returns this rank's metrics (they add up over ranks).

        `loss_fn(outputs, micro)` sees the model's outputs [b, T] and the rows they belong to, and returns a loss that
        is already divided by the global denominators, with metrics to match. Gradients over micro-batches and ranks
        add up, so neither their number nor their sizes matter. Where memory does not suffice they shrink, for good, and
        the metrics have `oom_retries` and `token_budget_min`; TrainingStopped where that is no way out.
        """
        assert self.optimizer is not None, "a frozen engine has no gradients"
        self.module.train(self._checkpointing)  # dropout is off; checkpointing acts in training mode alone
        earlier = {p: p.grad.clone() for p in self.module.parameters() if p.grad is not None}
        if self._sharing:
            batch, _ = self._sharing.gather(batch)
        if self._recovery.to_rehearse and self._sharing is None:
            self._recovery.rehearse(self._loss(batch, [], loss_fn, options)[0])
            self._recovery.restore_gradients(earlier)
        todo = self._micro_batches("train", batch, max_tokens, max_rows)
        metrics: list[dict[str, float]] = []
        while todo:
            self._sync_gradients(last=todo.last)
            compute = partial(self._loss, batch, todo.present, loss_fn, options)
            found = self._recovery.forward(compute, recoverable=self._recoverable(options))
            if found is None:
                todo.repeat(smaller=self._recovery.failed_here)
                continue
            loss, values = found
            complete = self._recovery.backward(loss)
            del found, loss  # the graph
            if not complete:  # some layers have their gradients, others do not: none of this call's can be kept
                self._recovery.restore_gradients(earlier)
                metrics.clear()
                todo.restart(smaller=self._recovery.failed_here)
                continue
            metrics.append(values)
            todo.advance()
            report_progress(todo.done, len(batch))
        self._reshard()
        if self._sharing and not self._sharing.first:
            return {}  # the group's metrics count once
        return reduce_metrics([*metrics, *(budget.take_metrics() for budget in self._budgets.values())])

    def optimizer_step(self, *, advance_schedule: bool = True) -> dict[str, float]:
        """Clip to `optim.clip_grad`, update, drop the gradients; `grad_norm` (before clipping), `lr`, `skipped` (0/1).

        A norm that is not finite skips the update on every rank and is counted in `counters.skipped`. The schedule
        moves on in either case, unless `advance_schedule` is false (several updates that share one rate).
        """
        assert self.optimizer is not None and self.optim is not None, "a frozen engine has no optimizer"
        lr = self.optim.lr * lr_factor(self.counters.schedule_steps, self.optim, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        grads = [cast(DTensor, p.grad) for p in self.module.parameters() if p.grad is not None]
        norm = clip_gradients(grads, self.optim.clip_grad)
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step()
            self.counters.updates += 1
        else:
            self.counters.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        if advance_schedule:
            self.counters.schedule_steps += 1
        return {"grad_norm": norm, "lr": lr, "skipped": float(not finite)}

    # ---- weights

    @contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        """The module with all parameters gathered in the computing dtype; nothing inside frees or gathers them again.

        For generation: any part of the module may be called, without gradients. The weights are those after the last
        optimizer step; they must not be changed inside, and no other verb of the engine may be called.
        """
        self.module.eval()
        with gathered(self._parts), torch.no_grad():
            yield self.module

    @contextmanager
    def lent(self) -> Iterator[nn.Module]:
        """The module, to be called without gradients between the passes of another engine.

        A call is collective, as any pass. What it returns, gathered parameters included, holds until the end.
        """
        self.module.eval()
        try:
            yield self.module
        finally:
            self._reshard()

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer of the state dict, whole, one at a time, on the engine's device."""
        self._reshard()
        for name, value in self.module.state_dict().items():
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    def state_dict(self) -> dict[str, Tensor]:
        """All weights, whole, on the CPU of rank 0; empty on the other ranks."""
        first = dist.get_rank() == 0
        whole: dict[str, Tensor] = {}
        for name, value in self.full_parameters():
            if first:
                whole[name] = value.detach().to("cpu", copy=True)
        return whole

    def export_hf(self, path: Path | str, *, tokenizer: Any | None = None, dtype: torch.dtype | None = None) -> None:
        """Write a plain Hugging Face directory (rank 0 writes; the others wait)."""
        weights = self.state_dict()
        if dist.get_rank() == 0:
            export_hf(self.module, path, state_dict=weights, tokenizer=tokenizer, dtype=dtype)  # type: ignore[arg-type]
        dist.barrier()

    def save(self, path: Path | str) -> None:
        """Write the sharded checkpoint (weights, optimizer, counters) into the directory `path`."""
        self._reshard()
        checkpoint.save(Path(path), self.module, self.optimizer, self.counters)

    def load(self, path: Path | str) -> None:
        """Read what `save` wrote, at this or another world size. UserError if the checkpoint does not fit."""
        self._reshard()
        self.counters = checkpoint.load(Path(path), self.module, self.optimizer)

    def offload(self, *, parameters: bool = True, optimizer: bool = True) -> None:
        """Move weights and optimizer state to CPU memory; a no-op for an engine that lives there."""
        self._move(torch.device("cpu"), parameters, optimizer)

    def onload(self, *, parameters: bool = True, optimizer: bool = True) -> None:
        """Bring them back to the device; needed before any other verb."""
        self._move(self.device, parameters, optimizer)

    # ---- inside

    def _move(self, device: torch.device, parameters: bool, optimizer: bool) -> None:
        if self._host_resident:
            return
        self._reshard()
        if parameters:
            self.module.to(device)
        if optimizer and self.optimizer is not None:
            for state in self.optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        state[name] = value.to(device)
        if device.type == "cpu":
            torch.cuda.empty_cache()

    def _micro_batches(self, verb: str, batch: Batch, max_tokens: int | None, max_rows: int | None) -> MicroBatches:
        lengths = (batch["prompt_lengths"] + batch["response_lengths"]).tolist()
        share = self._sequence_parallel  # each rank computes that part of every micro-batch
        max_tokens, max_rows = (None if limit is None else limit * share for limit in (max_tokens, max_rows))
        packed = getattr(self.module, "packed", False)
        return MicroBatches(lengths, self._budgets[verb], max_tokens=max_tokens, max_rows=max_rows, packed=packed)

    def _recoverable(self, options: Mapping[str, Any]) -> bool:
        """A sharded reference, or ranks that share rows, exchange more in a pass than one that failed can serve."""
        return dist.get_world_size() == 1 or (options.get("reference") is None and self._sharing is None)

    def _outputs(self, batch: Batch, indices: list[int], options: dict[str, Any]) -> dict[str, Tensor]:
        return self.module(self._rows(batch.take(indices)) if indices else self._empty_rows(), **options)

    def _loss(
        self, batch: Batch, indices: list[int], loss_fn: LossFn, options: dict[str, Any]
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss and metrics of some rows; of none, a zero that depends on every output."""
        outputs = self._outputs(batch, indices, options)
        if not indices:  # this rank has run out of rows; the others need its part of every gather and reduction
            return torch.stack([value.sum() for value in outputs.values()]).sum() * 0.0, {}
        loss, values = loss_fn(outputs, batch.take(indices).to(self.device))
        return loss, {name: float(value) for name, value in values.items()}

    def _rows(self, micro: Batch) -> dict[str, Tensor]:
        return {name: micro[name].to(self.device) for name in FIELDS}

    def _empty_rows(self) -> dict[str, Tensor]:
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        one = torch.ones(1, dtype=torch.long, device=self.device)
        return dict(zip(FIELDS, (token, one, token, one), strict=True))

    def _sync_gradients(self, *, last: bool) -> None:
        """One rank adds up gradients until the last micro-batch; several reduce each at once, to hold only shards."""
        sync = last or dist.get_world_size() > 1
        for part in self._parts:
            part.set_requires_gradient_sync(sync, recurse=False)
            part.set_reshard_after_backward(sync, recurse=False)

    def _reshard(self) -> None:
        """Back to sharded parameters: the root keeps its copy after a forward, which the next step makes stale."""
        for part in self._parts:
            part.reshard()
