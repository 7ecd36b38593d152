"""The FSDP2 training engine; the same code for one rank and for many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from valor.config.engine import BackboneConfig, FSDPConfig, OptimConfig
from valor.data.batch import Batch
from valor.engines import checkpoint
from valor.engines.base import Limit, LossFn, TrainingEngine, collect, deterministic_backward, rows_of
from valor.engines.fsdp.loading import built_once
from valor.engines.fsdp.sharding import gathered, rank_mesh, reshards, sequence_group, shard, transformer_layers
from valor.engines.kernels import use_kernels
from valor.engines.optim import build_optimizer, global_norm
from valor.errors import TrainingStopped, out_of_memory
from valor.machine import memory
from valor.models import attention
from valor.models.internals import drop_unreduced_gradients, forget_broken_pass
from valor.models.linear import bfloat16_is_slow, compute_in_float32
from valor.models.load import import_model_code
from valor.models.lora import adapters_off, has_adapters
from valor.models.policy import Reference
from valor.models.rows import CompactRows, Sharing
from valor.tracking.metrics import reduce_metrics
from valor.tracking.progress import report_progress

_MOST_PINNED = 0.5  # of the host's free memory, which pinned memory takes from all processes

_Result = TypeVar("_Result")


def build_fsdp(
    section: Any,
    model: BackboneConfig,
    load: Callable[..., nn.Module],
    *,
    device: torch.device,
    total_steps: int = 0,
    trainable: bool = True,
) -> FSDPEngine:
    """See `valor.engines.base.BuildEngine`. Of `section` it reads `fsdp_config`, `optim` (if trainable) and
    `ulysses_sequence_parallel_size`. One rank reads the model."""
    fsdp: FSDPConfig = section.fsdp_config
    load = partial(load, dtype=getattr(torch, fsdp.model_dtype))
    module = built_once(load, prepare=partial(import_model_code, model))
    layers = transformer_layers(module)
    engine = FSDPEngine(
        module,
        fsdp=fsdp,
        optim=section.optim if trainable else None,
        device=device,
        total_steps=total_steps,
        sequence_parallel=getattr(section, "ulysses_sequence_parallel_size", 1),
    )
    use_kernels(engine, layers, model, fsdp.dtype)
    return engine


class FSDPEngine(TrainingEngine):
    """See `valor.engines.base.TrainingEngine`; without `optim` it only evaluates.

    The process group exists before the engine (`distributed.init_process_group`). The weights are those of rank 0's
    `module`; elsewhere it may have none (`built_once`).
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
        self._fsdp, self._sequence_parallel = fsdp, sequence_parallel
        if sequence_parallel > 1:
            cast(Any, module).sharing = Sharing(positions=sequence_group(module, sequence_parallel))
        if device.type == "cpu" and fsdp.dtype == "bfloat16" and bfloat16_is_slow():
            compute_in_float32(module)
        self.data_parallel_rank = dist.get_rank() // sequence_parallel
        super().__init__(module, optim, device, total_steps)
        self._saves_memory = mesh.size() > 1 and reshards(fsdp, device)
        self._parts = shard(module, fsdp, device, mesh)
        self._host_resident = device.type == "cpu" or fsdp.offload_policy  # nothing to move between phases
        self._checkpointing = [m for m in module.modules() if getattr(m, "gradient_checkpointing", False)]
        self.optimizer = build_optimizer(module, optim) if optim is not None else None
        self._first_norm = self._weight_norm()
        if device.type in attention.VARLEN_DEVICES and getattr(module, "packed", False):
            with torch.no_grad():
                self._outputs(Batch(), [], {})  # so that variable-length attention is probed outside of a checkpoint
            self._reshard()
        self.offload()

    @torch.no_grad()
    def forward(
        self, batch: Batch, *, max_tokens: Limit = None, max_rows: Limit = None, **options: Any
    ) -> dict[str, Tensor]:
        self.module.eval()
        outputs: dict[str, Tensor] = {}
        todo = self._micro_batches("forward", batch, max_tokens, max_rows, share=self._sequence_parallel)
        while todo:
            indices = todo.present
            some = self._attempt(partial(self._outputs, batch, indices, options))
            if some is None:
                todo.restart()
                continue
            collect(outputs, some, indices, batch["responses"])
            todo.advance()
            report_progress(todo.done, len(batch))
        self._reshard()
        return outputs

    def forward_backward(
        self, batch: Batch, loss_fn: LossFn, *, max_tokens: Limit = None, max_rows: Limit = None, **options: Any
    ) -> dict[str, float]:
        """Out of memory, a single process makes its micro-batches smaller for good, and the metrics have `oom_retries`
        and `token_budget_min`; TrainingStopped: of one row, or with several processes."""
        assert self.optimizer is not None, "a frozen engine has no gradients"
        self.module.eval()
        for part in self._checkpointing:  # which acts in training mode alone; in it some routers choose at random
            part.training = True
        earlier = {p: p.grad.clone() for p in self.module.parameters() if p.grad is not None}
        todo = self._micro_batches("train", batch, max_tokens, max_rows, share=self._sequence_parallel)
        metrics: list[Mapping[str, Any]] = []  # on the device, where passes are still under way
        while todo:
            self._sync_gradients(last=todo.last)
            values = self._attempt(partial(self._train_on, batch, todo.present, options, loss_fn))
            if values is None:  # some layers may have their gradients: none of this call's can be kept
                self._restore_gradients(earlier)
                metrics.clear()
                todo.restart()
                continue
            metrics.append(values)
            todo.advance()
            report_progress(todo.done, len(batch))
        self._reshard()
        return reduce_metrics([*self._numbers(metrics), *(budget.take_metrics() for budget in self._budgets.values())])

    def _gradients(self) -> tuple[float, list[Tensor]]:
        grads = [cast(DTensor, p.grad) for p in self.module.parameters() if p.grad is not None]
        return global_norm(grads), [grad.to_local() for grad in grads]

    @contextmanager
    def unsharded(self) -> Iterator[Any]:
        """The module with all parameters gathered; nothing inside frees or gathers them again."""
        self.module.eval()
        with gathered(self._parts), torch.no_grad():
            yield self.module

    @property
    def generation_module(self) -> nn.Module | None:
        return self.module.hf

    @contextmanager
    def reference(self) -> Iterator[Reference]:
        """What a call returns, gathered parameters included, holds until the end."""
        if has_adapters(self.module.hf):
            yield partial(_without_adapters, self.module)
            return
        self.module.eval()
        try:
            yield partial(self.module, as_reference=True)
        finally:
            self._reshard()

    def without_adapters(self) -> AbstractContextManager[None]:
        return adapters_off(self.module.hf)

    @torch.no_grad()
    def approach(self, other: FSDPEngine, rate: float) -> None:
        """Move each weight this share of the way to that of `other`, a model of the same shapes and sharding."""
        self._reshard()
        other._reshard()
        for weight, target in zip(self.module.parameters(), other.module.parameters(), strict=True):
            cast(DTensor, weight).to_local().lerp_(cast(DTensor, target).to_local(), rate)

    @property
    def checkpoint_bytes(self) -> int:
        return checkpoint.size(self.module, self.optimizer)

    def save(self, path: Path) -> None:
        self._reshard()
        checkpoint.save(path, self.module, self.optimizer, self.counters)

    def load(self, path: Path) -> None:
        self._reshard()
        self.counters = checkpoint.load(path, self.module, self.optimizer)

    def offload(self) -> None:
        self._move(torch.device("cpu"), optimizer=True)

    def onload(self, *, optimizer: bool = True) -> None:
        self._move(self.device, optimizer)

    @torch.no_grad()
    def _weight_norm(self) -> float:
        return global_norm([cast(DTensor, p) for p in self.module.parameters() if p.requires_grad])

    def _unsharded_tensors(self) -> Iterator[tuple[str, Tensor]]:
        self._reshard()
        for name, value in self.module.state_dict().items():
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    def _move(self, device: torch.device, optimizer: bool) -> None:
        moves_optimizer = optimizer and self._fsdp.optimizer_offload and self.optimizer is not None
        if self._host_resident or not (self._fsdp.param_offload or moves_optimizer):
            return
        self._reshard()
        states = self.optimizer.state.values() if moves_optimizer and self.optimizer is not None else ()
        tensors = [(state, name, x) for state in states for name, x in state.items() if isinstance(x, Tensor)]
        moved = [*(self.module.parameters() if self._fsdp.param_offload else ()), *(x for _, _, x in tensors)]
        # A copy that need not be waited for goes to pinned memory, of which torch takes the next power of two.
        pinned = 2 * sum(x.nbytes for x in moved) <= _MOST_PINNED * memory().available
        if self._fsdp.param_offload:
            self.module.to(device, non_blocking=pinned)
        for state, name, x in tensors:
            state[name] = x.to(device, non_blocking=pinned)
        if pinned and device.type == "cpu":
            torch.cuda.synchronize(self.device)

    def _attempt(self, function: Callable[[], _Result]) -> _Result | None:
        """What `function`, a pass of the module, returns; None where memory did not suffice. TrainingStopped with
        several processes: the others wait for this one's part in gathers and reductions."""
        try:
            return function()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            if dist.get_world_size() > 1:
                raise TrainingStopped(
                    f"out of memory in one of {dist.get_world_size()} processes, which cannot repeat a pass: lower "
                    "ppo_max_token_len_per_gpu, or set model.enable_gradient_checkpointing=true"
                ) from error
        forget_broken_pass(self._parts[0])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # only now are the pass's tensors free: the exception had held on to them
        return None

    def _apply_update(self) -> None:
        assert self.optimizer is not None
        try:
            self.optimizer.step()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise TrainingStopped(
                "out of memory in the optimizer's step, the first of which makes two float32 numbers for each trained "
                "weight: shard over more processes (trainer.n_gpus_per_node), set fsdp_config.optimizer_offload=true "
                "for all roles, or train adapters (model.lora_rank)"
            ) from error

    def _restore_gradients(self, earlier: Mapping[nn.Parameter, Tensor]) -> None:
        """Drop all gradients, also those that FSDP has not reduced yet, but for the `earlier` ones."""
        for part in self._parts:
            drop_unreduced_gradients(part)
        for parameter in self.module.parameters():
            parameter.grad = earlier.get(parameter)

    def _outputs(self, batch: Batch, indices: list[int], options: dict[str, Any]) -> Any:
        return self.module(rows_of(batch, indices), **options)

    def _train_on(
        self, batch: Batch, indices: list[int], options: dict[str, Any], loss_fn: LossFn
    ) -> Mapping[str, Any]:
        """Adds the gradients of a micro-batch; returns its metrics."""
        loss, values = self._loss(self._outputs(batch, indices, options), batch, indices, loss_fn)
        with deterministic_backward():
            loss.backward()
        return values

    def _sync_gradients(self, *, last: bool) -> None:
        """One rank adds up gradients until the last micro-batch, and so do several that have the memory; else they
        reduce each at once, to hold only shards."""
        sync = last or self._saves_memory
        for part in self._parts:
            part.set_requires_gradient_sync(sync, recurse=False)
            part.set_reshard_after_backward(sync, recurse=False)

    def _reshard(self) -> None:
        """Back to sharded parameters: the root keeps its copy after a forward, which the next step makes stale."""
        for part in self._parts:
            part.reshard()


def _without_adapters(module: Any, rows: CompactRows) -> Any:
    """What a policy answers as its own reference, inside a pass of its own: the hooks around it have run already."""
    with adapters_off(module.hf):
        return module.forward(rows, as_reference=True)
