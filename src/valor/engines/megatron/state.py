"""Checkpoints of the Megatron engine: those of `engines.checkpoint`, under the names that transformers gives tensors.

So they can be read under any layout of ranks, and by the other engine, which writes the same. A rank writes its shards
of the weights; the optimizer's state, which data-parallel ranks may each have a part of, is put together parameter by
parameter, and the ranks divide the parameters among themselves.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from valor.engines import checkpoint
from valor.engines.checkpoint import Counters
from valor.engines.megatron.layout import mpu
from valor.engines.megatron.weights import Slot, Weights

OPTIMIZER = "AdamW"
MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainedState:
    """The float32 weights and the moments of each parameter, whichever data-parallel rank has which part of them."""

    def __init__(self, optimizer: Any) -> None:
        self._parts: list[Any] = list(getattr(optimizer, "chained_optimizers", [optimizer]))

    def get(self, parameter: nn.Parameter, what: str) -> Tensor:
        """`param` or one of MOMENTS, in the parameter's shape (collective over its data-parallel ranks)."""
        part, main, begin = self._find(parameter)
        if main is None:
            own = None
        else:
            own = main if what == "param" else part.optimizer.state[main][what]
        if not isinstance(part, DistributedOptimizer):
            assert own is not None
            return own.detach().view(parameter.shape)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if own is not None:
            whole[begin : begin + own.numel()] = own.detach().view(-1)
        dist.all_reduce(whole, group=part.data_parallel_group)
        return whole.view(parameter.shape)

    def set(self, parameter: nn.Parameter, values: dict[str, Tensor], updates: int) -> None:
        """What `get` gives; without moments those that there are, are dropped."""
        part, main, begin = self._find(parameter)
        parameter.data.copy_(values["param"])
        if main is None:
            return
        own = {name: value.view(-1)[begin : begin + main.numel()].view(main.shape) for name, value in values.items()}
        main.data.copy_(own["param"])
        state = part.optimizer.state
        state.pop(main, None)
        if len(own) > 1:
            state[main] = {name: own[name].to(main.device, main.dtype, copy=True) for name in MOMENTS}
            if isinstance(part.optimizer, torch.optim.AdamW):
                state[main]["step"] = torch.tensor(float(updates))
            else:  # a fused one counts for all of a group
                for group in part.optimizer.param_groups:
                    group["step"] = updates

    def _find(self, parameter: nn.Parameter) -> tuple[Any, Tensor | None, int]:
        """The optimizer of this parameter, the tensor that it updates here, and where that begins in the parameter."""
        for part in self._parts:
            if isinstance(part, DistributedOptimizer):
                if not any(parameter in buffer.param_index_map for buffer in part.buffers):
                    continue
                if parameter not in part.model_param_group_index_map:
                    return part, None, 0  # other ranks have all of it
                group, order = part.model_param_group_index_map[parameter]
                begin = part._get_model_param_range_map(parameter)["param"].start
                return part, part.optimizer.param_groups[group]["params"][order], begin
            main = getattr(parameter, "main_param", None)
            main = parameter if main is None else main
            if any(main is one for group in part.param_groups for one in group["params"]):
                return part, main, 0
        raise AssertionError("a parameter that no optimizer has")


def optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """All that an optimizer has on the device: the weights that it updates, and its state."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    held = [parameter for part in parts for group in part.param_groups for parameter in group["params"]]
    moments = [value for part in parts for one in part.optimizer.state.values() for value in one.values()]
    return held + [value for value in moments if isinstance(value, Tensor) and value.dim()]


def save(path: Path, weights: Weights, module: nn.Module, optimizer: Any, counters: Counters) -> None:
    """Diverged: some numbers are not finite."""
    trained = TrainedState(optimizer) if optimizer is not None else None
    moments = MOMENTS if trained is not None and counters.updates else ()
    tensors: dict[str, Tensor] = {}
    for number, slot in enumerate(weights.slots):
        for what in ("param", *moments):
            values = [p.detach() if trained is None else trained.get(p, what) for p in slot.parameters]
            shard, group, dim = slot.read_shard(values)
            name = f"hf.{slot.name}"
            if not checkpoint.is_finite(shard):
                raise checkpoint.not_saved(name if what == "param" else f"{what} of {name}")
            if number % _copies(slot).size() == _copies(slot).rank():
                key = f"model.{name}" if what == "param" else f"optimizer.{name}.{what}"
                tensors[key] = _global(shard.cpu().contiguous(), slot, group, dim)
    steps = {name: {"step": {"tensor": float(counters.updates), "dtype": "float32"}} for name in weights.names}
    kind = OPTIMIZER if optimizer is not None else None
    checkpoint.write(path, module, tensors, counters, kind, steps if moments else {})


def load(path: Path, weights: Weights, module: nn.Module, optimizer: Any) -> Counters:
    """UserError: as `engines.checkpoint.load`."""
    state, stored = checkpoint.begin_to_read(path, module, OPTIMIZER if optimizer is not None else None)
    moments = MOMENTS if any(name.startswith("optimizer.") for name in stored) else ()
    shapes = {f"model.{name}": shape for name, shape in weights.shapes.items()}
    shapes |= {f"optimizer.{name}.{what}": shape for name, shape in weights.shapes.items() for what in moments}
    tensors: dict[str, Tensor] = {}
    waiting: list[tuple[Slot, str, Tensor]] = []
    for slot in weights.slots:
        empty = [torch.empty_like(p, dtype=torch.float32) for p in slot.parameters]
        shard, group, dim = slot.read_shard(empty)
        for what in ("param", *moments):
            name = f"model.hf.{slot.name}" if what == "param" else f"optimizer.hf.{slot.name}.{what}"
            place = tensors.get(name)
            local = torch.empty(shard.shape) if place is None else place
            if place is None:
                tensors[name] = _global(local, slot, group, dim)
            waiting.append((slot, what, local.to_local() if isinstance(local, DTensor) else local))
    checkpoint.read_into(path, tensors, stored, shapes)
    found: dict[nn.Parameter, dict[str, Tensor]] = {}
    for slot, what, local in waiting:
        if not checkpoint.is_finite(local):
            raise checkpoint.of_no_use(path, slot.name)
        for parameter in slot.parameters:
            found.setdefault(parameter, {}).setdefault(what, torch.zeros(parameter.shape, dtype=torch.float32))
        slot.write_shard([found[parameter][what] for parameter in slot.parameters], local)
    counters = Counters(**state["counters"])
    trained = TrainedState(optimizer) if optimizer is not None else None
    for parameter, values in found.items():
        if trained is None:
            parameter.data.copy_(values["param"])
        else:
            trained.set(parameter, {k: v.to(parameter.device) for k, v in values.items()}, counters.updates)
    return counters


def _copies(slot: Slot) -> Any:
    """The ranks that have the same shard."""
    if slot.stacked:
        return mpu.get_expert_data_parallel_group()
    return mpu.get_data_parallel_group(with_context_parallel=True)


def _global(shard: Tensor, slot: Slot, group: Any, dim: int) -> Tensor:
    """The shard, marked as such."""
    if group is None:
        return shard
    mesh = DeviceMesh.from_group(group, "cpu")
    stride = torch.empty(slot.flat, device="meta").stride()
    return DTensor.from_local(shard, mesh, [Shard(dim)], run_check=False, shape=torch.Size(slot.flat), stride=stride)
