"""The training engine by megatron-core."""

# pyright: reportMissingImports=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from valor.config.engine import BackboneConfig, MegatronConfig, OptimConfig
from valor.data.batch import Batch
from valor.engines.base import Limit, LossFn, TrainingEngine, collect, deterministic_backward, rows_of
from valor.engines.fsdp.loading import built_once
from valor.engines.megatron import state
from valor.engines.megatron.layout import make_groups, mpu
from valor.engines.megatron.memory import HostMemory
from valor.engines.megatron.model import Face, StageEnd, build_stage, transformer_config
from valor.engines.megatron.weights import Weights
from valor.errors import TrainingStopped, UserError, out_of_memory
from valor.models.internals import around
from valor.models.load import import_model_code
from valor.models.lora import has_adapters
from valor.models.policy import PolicyModel, Reference
from valor.models.rows import Sharing
from valor.tracking.metrics import reduce_metrics
from valor.tracking.progress import report_progress


def build_megatron(
    section: Any,
    model: BackboneConfig,
    load: Callable[..., nn.Module],
    *,
    device: torch.device,
    total_steps: int = 0,
    trainable: bool = True,
) -> MegatronEngine:
    """See `valor.engines.base.BuildEngine`. Of `section` it reads `megatron` and `optim` (if trainable). One rank reads
    the model."""
    if model.compile or model.use_liger:
        raise UserError("strategy=megatron has kernels of its own: leave model.compile and model.use_liger out")
    import_model_code(model)
    make_groups(section.megatron, device)
    prepare = partial(import_model_code, model)
    module = built_once(partial(load, dtype=getattr(torch, section.megatron.dtype)), prepare=prepare)
    optim = section.optim if trainable else None
    return MegatronEngine(module, megatron=section.megatron, optim=optim, device=device, total_steps=total_steps)


class MegatronEngine(TrainingEngine):
    """See `valor.engines.base.TrainingEngine`; without `optim` it only evaluates.

    megatron-core's groups exist before the engine (`make_groups`). The weights are those of rank 0's `module`, which
    is left without any.
    """

    def __init__(
        self,
        module: Any,
        *,
        megatron: MegatronConfig,
        optim: OptimConfig | None,
        device: torch.device,
        total_steps: int = 0,
    ) -> None:
        super().__init__(module, optim, device, total_steps)
        if has_adapters(module.hf):
            raise UserError("strategy=megatron trains all weights: set model.lora_rank=0, or use strategy=fsdp2")
        self.data_parallel_rank = mpu.get_data_parallel_rank()
        self._megatron = megatron
        self._weight_memory, self._optimizer_memory = HostMemory(), HostMemory()
        recompute = optim is not None and any(getattr(m, "gradient_checkpointing", False) for m in module.modules())
        self._config = transformer_config(module.hf, megatron, recompute=recompute)
        if not getattr(module, "packed", False) and megatron.sizes["tensor"] * megatron.sizes["context"] > 1:
            raise UserError(
                "megatron: tensor and context parallel ranks share packed rows out: leave model.use_remove_padding=true"
            )
        is_policy = isinstance(module, PolicyModel)
        stage = build_stage(module.hf, self._config, head=None if is_policy else module.float32_modules()[0])
        self._face = Face(stage, module.hf, shares_tokens=is_policy)
        self._weights = Weights(stage, module)
        self._weights.take(module, device)
        for parameter in module.parameters():
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to("meta"), requires_grad=False))
        self._model = around(module, self._face)
        self._model.sharing = self._sharing(is_policy)
        self._stage: Any = stage
        if optim is None:
            stage.requires_grad_(False)
        else:
            self._make_trainable(optim)
        self._first_norm = self._weight_norm()
        self.offload()

    @torch.no_grad()
    def forward(
        self, batch: Batch, *, max_tokens: Limit = None, max_rows: Limit = None, **options: Any
    ) -> dict[str, Tensor]:
        self._model.eval()
        groups = self._plan("forward", batch, max_tokens, max_rows)
        by_group = self._run(batch, groups, options, lambda outputs, indices: outputs, forward_only=True)
        outputs: dict[str, Tensor] = {}
        for indices, some in zip(groups, by_group, strict=False):
            collect(outputs, some, indices, batch["responses"])
        return self._from_last_stage(outputs)

    def forward_backward(
        self, batch: Batch, loss_fn: LossFn, *, max_tokens: Limit = None, max_rows: Limit = None, **options: Any
    ) -> dict[str, float]:
        assert self.optimizer is not None, "a frozen engine has no gradients"
        groups = self._plan("train", batch, max_tokens, max_rows)

        def finish(outputs: dict[str, Tensor], indices: list[int]) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
            loss, values = self._loss(outputs, batch, indices, loss_fn)
            return loss, torch.zeros((), dtype=torch.int, device=self.device), values

        with deterministic_backward():
            metrics = self._run(batch, groups, options, finish, forward_only=False)
        return self._from_last_stage(reduce_metrics(self._numbers(metrics)))

    def _plan(self, verb: str, batch: Batch, max_tokens: Limit, max_rows: Limit) -> list[list[int]]:
        """The rows of each micro-batch; empty ones where other ranks have more."""
        share = self._megatron.context_parallel_size
        todo = self._micro_batches(verb, batch, max_tokens, max_rows, share=share)
        groups = []
        while todo:
            groups.append(todo.present)
            todo.advance()
        return groups

    def _run(
        self,
        batch: Batch,
        groups: list[list[int]],
        options: dict[str, Any],
        finish: Callable[[dict[str, Tensor], list[int]], Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Every micro-batch through all stages; on the last stage what `finish` makes of each one's outputs (training:
        the last of what it returns)."""
        staged = self._megatron.pipeline_model_parallel_size > 1
        assert not (staged and options.get("reference")), "the reference has stages of its own"
        done = 0

        def step(waiting: Iterator[list[int]], _: Any) -> tuple[Any, Any]:
            indices = next(waiting)
            try:
                outputs = self._model(rows_of(batch, indices), **options)
            except StageEnd as end:
                return end.args[0], None
            nonlocal done
            done += len(indices)
            report_progress(done, len(batch))
            return outputs, lambda outputs, **_: finish(outputs, indices)

        self._stage.train(not forward_only)
        try:
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(groups),
                model=self._stage,
                num_microbatches=len(groups),
                seq_length=1,  # of no account where lengths vary
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise TrainingStopped(
                "out of memory in a pass of megatron-core, which cannot be repeated: lower ppo_max_token_len_per_gpu, "
                "or set model.enable_gradient_checkpointing=true or larger megatron parallel sizes"
            ) from error

    def _from_last_stage(self, value: Any) -> Any:
        group = mpu.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, mpu.get_pipeline_model_parallel_last_rank(), group, self.device)
        return box[0]

    def _make_trainable(self, optim: OptimConfig) -> None:
        config = self._config
        distributed: dict[str, Any] = {"use_distributed_optimizer": True}
        adam = MegatronOptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            clip_grad=0.0,  # gradients are clipped here
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            **distributed,
        )
        reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **distributed)
        self._stage = DistributedDataParallel(config, reduction, self._stage)
        # Without a number of tokens: the losses are divided by the global denominators already.
        config.finalize_model_grads_func = lambda stages, _, **more: finalize_model_grads(stages, None, **more)
        # No overrides: weight decay acts on every parameter, as in the other engine.
        self.optimizer = get_megatron_optimizer(adam, [self._stage], {}, use_gloo_process_groups=False)

    def _gradients(self) -> tuple[float, list[Tensor]]:
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        return norm, [p.grad for p in self.optimizer.get_parameters() if p.grad is not None]

    def _apply_update(self) -> None:
        self.optimizer.step_with_ready_grads()

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad()
        self._stage.zero_grad_buffer()

    def _weight_norm(self) -> float:
        return self._weights.norm() if self.optim is not None else 0.0

    def _unsharded_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._weights.full(self.device)

    @property
    def generation_module(self) -> None:
        return None

    def unsharded(self) -> Any:
        raise RuntimeError("megatron-core's ranks hold parts of layers, which transformers cannot run")

    @contextmanager
    def reference(self) -> Iterator[Reference]:
        self._stage.eval()
        yield partial(self._model, as_reference=True)

    def without_adapters(self) -> Any:
        return nullcontext()

    @property
    def checkpoint_bytes(self) -> int:
        numbers = sum(math.prod(shape) for shape in self._weights.shapes.values())
        return numbers * (12 if self.optim is not None else self._config.params_dtype.itemsize)

    def save(self, path: Path) -> None:
        state.save(path, self._weights, self.module, self.optimizer, self.counters)

    def load(self, path: Path) -> None:
        self.counters = state.load(path, self._weights, self.module, self.optimizer)

    def offload(self) -> None:
        if self.device.type == "cpu":
            return
        parameters = list(self._face.stage.parameters())
        if self.optimizer is not None and self._megatron.optimizer_offload:
            self._optimizer_memory.leave(state.optimizer_tensors(self.optimizer), besides=parameters)
        if self._megatron.param_offload:
            self._weight_memory.leave(parameters)
        if self.optimizer is not None and self._megatron.optimizer_offload:
            self._stage.offload_grad_buffers()

    def onload(self, *, optimizer: bool = True) -> None:
        self._weight_memory.come_back()
        if optimizer:
            self._optimizer_memory.come_back()
        if optimizer and self.optimizer is not None:
            self._stage.restore_grad_buffers(synchronize=False)  # those that have left

    def _sharing(self, is_policy: bool) -> Sharing:
        """How ranks divide rows."""
        tensor, context = mpu.get_tensor_model_parallel_group(), mpu.get_context_parallel_group()
        multiple = tensor.size() if self._config.sequence_parallel else 1
        positions = context if context.size() > 1 else None
        if not is_policy or tensor.size() == 1:
            return Sharing(positions, None, positions, multiple)
        return Sharing(positions, tensor, mpu.get_tensor_and_context_parallel_group(), multiple)
