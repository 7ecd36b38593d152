"""Checkpoints of the Megatron engine: those of `engines.checkpoint`, under the names that transformers gives tensors.

So they can be read under any layout of ranks, and by the other engine, which writes the same. A rank writes its shards
of the weights; the optimizer's state, which data-parallel ranks may each have a part of, is put together parameter by
parameter, and the ranks divide the parameters among themselves.
"""

# pyright: reportMissingImports=false

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


def _trained(optimizer: Any, parameter: nn.Parameter, what: str) -> Tensor:
    """The float32 weights (`param`) or one of MOMENTS, in the parameter's shape, whichever of its data-parallel ranks
    has which part of them (collective over these)."""
    part, main, begin = _find(optimizer, parameter)
    own = main if main is None or what == "param" else part.optimizer.state[main][what]
    if not isinstance(part, DistributedOptimizer):
        assert own is not None
        return own.detach().view(parameter.shape)
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if own is not None:
        whole[begin : begin + own.numel()] = own.detach().view(-1)
    dist.all_reduce(whole, group=part.data_parallel_group)
    return whole.view(parameter.shape)


def _set_trained(optimizer: Any, parameter: nn.Parameter, values: dict[str, Tensor], updates: int) -> None:
    """What `_trained` gives; without moments those that there are, are dropped."""
    part, main, begin = _find(optimizer, parameter)
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


def _find(optimizer: Any, parameter: nn.Parameter) -> tuple[Any, Tensor | None, int]:
    """The optimizer of this parameter, the tensor that it updates here, and where that begins in the parameter."""
    for part in optimizer.chained_optimizers:
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
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [one for part in optimizer.chained_optimizers for one in part.optimizer.state.values()]
    return held + [value for one in states for value in one.values() if isinstance(value, Tensor) and value.dim()]


def save(path: Path, weights: Weights, module: nn.Module, optimizer: Any, counters: Counters) -> None:
    """Diverged: some numbers are not finite."""
    moments = MOMENTS if optimizer is not None and counters.updates else ()
    tensors: dict[str, Tensor] = {}
    for number, slot in enumerate(weights.slots):
        for what in ("param", *moments):
            values = [p.detach() if optimizer is None else _trained(optimizer, p, what) for p in slot.parameters]
            shard, group, dim = slot.read_shard(values)
            if not checkpoint.is_finite(shard):
                raise checkpoint.not_saved(slot.name if what == "param" else f"{what} of {slot.name}")
            if number % _copies(slot).size() == _copies(slot).rank():
                tensors[_stored_name(slot.name, what)] = _global(shard.cpu().contiguous(), slot, group, dim)
    steps = {name: {"step": {"tensor": float(counters.updates), "dtype": "float32"}} for name in weights.shapes}
    kind = OPTIMIZER if optimizer is not None else None
    checkpoint.write(path, module, tensors, counters, kind, steps if moments else {})


def load(path: Path, weights: Weights, module: nn.Module, optimizer: Any) -> Counters:
    """UserError: as `engines.checkpoint.load`."""
    state, stored = checkpoint.begin_to_read(path, module, OPTIMIZER if optimizer is not None else None)
    kinds = ("param", *(MOMENTS if any(name.startswith("optimizer.") for name in stored) else ()))
    shapes = {_stored_name(name, what): shape for name, shape in weights.shapes.items() for what in kinds}
    tensors: dict[str, Tensor] = {}
    waiting: list[tuple[Slot, str, Tensor]] = []
    for slot in weights.slots:
        empty = [torch.empty_like(p, dtype=torch.float32) for p in slot.parameters]
        shard, group, dim = slot.read_shard(empty)
        for what in kinds:
            name = _stored_name(slot.name, what)
            if name not in tensors:  # a tied one may have two slots
                tensors[name] = _global(torch.empty(shard.shape), slot, group, dim)
            local = tensors[name]
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
    for parameter, values in found.items():
        values = {what: value.to(parameter.device) for what, value in values.items()}
        parameter.data.copy_(values["param"])
        if optimizer is not None:
            _set_trained(optimizer, parameter, values, counters.updates)
    return counters


def _stored_name(name: str, what: str) -> str:
    return f"model.{name}" if what == "param" else f"optimizer.{name}.{what}"


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
