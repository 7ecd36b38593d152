"""Checkpoints of the Megatron engine: those of `engines.checkpoint`, under the names that transformers gives tensors.

So they can be read under any layout of ranks, and by the other engine. Tensors are put together one after another, and
the ranks of a stage divide them among themselves.
"""

# pyright: reportMissingImports=false

from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from valor.engines import checkpoint
from valor.engines.checkpoint import Counters
from valor.engines.megatron.internals import begin_of
from valor.engines.megatron.layout import mpu
from valor.engines.megatron.weights import Weights

OPTIMIZER = "AdamW"
MOMENTS = ("exp_avg", "exp_avg_sq")


def _trained(optimizer: Any, parameter: nn.Parameter, what: str) -> Tensor:
    """The float32 weights (`param`) or one of MOMENTS, in the parameter's shape, whichever of its data-parallel ranks
    has which part of them (collective over these)."""
    part, main, begin = _find(optimizer, parameter)
    full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if main is not None:
        local = main if what == "param" else part.optimizer.state[main][what]
        full[begin : begin + local.numel()] = local.detach().view(-1)
    dist.all_reduce(full, group=part.data_parallel_group)
    return full.view(parameter.shape)


def _set_trained(optimizer: Any, parameter: nn.Parameter, values: dict[str, Tensor], updates: int) -> None:
    """What `_trained` gives; without moments those that there are, are dropped."""
    part, main, begin = _find(optimizer, parameter)
    if main is None:
        return
    local = {name: value.view(-1)[begin : begin + main.numel()].view(main.shape) for name, value in values.items()}
    main.data.copy_(local["param"])
    state = part.optimizer.state
    state.pop(main, None)
    if len(local) > 1:
        state[main] = {name: local[name].to(main.device, main.dtype, copy=True) for name in MOMENTS}
        if isinstance(part.optimizer, torch.optim.AdamW):
            state[main]["step"] = torch.tensor(float(updates))
        else:  # a fused one counts for all of a group
            for group in part.optimizer.param_groups:
                group["step"] = updates


def _find(optimizer: Any, parameter: nn.Parameter) -> tuple[Any, Tensor | None, int]:
    """The optimizer of this parameter, the tensor that it updates here, and where that begins in the parameter."""
    for part in optimizer.chained_optimizers:
        if not any(parameter in buffer.param_index_map for buffer in part.buffers):
            continue
        if parameter not in part.model_param_group_index_map:
            return part, None, 0  # other ranks have all of it
        group, order = part.model_param_group_index_map[parameter]
        return part, part.optimizer.param_groups[group]["params"][order], begin_of(part, parameter)
    raise AssertionError("a parameter that no optimizer has")


def optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """All that an optimizer has on the device: the weights that it updates, and its state."""
    weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [state for part in optimizer.chained_optimizers for state in part.optimizer.state.values()]
    values = [value for state in states for value in state.values()]
    return weights + [value for value in values if isinstance(value, Tensor) and value.dim()]


def save(path: Path, weights: Weights, module: nn.Module, optimizer: Any, counters: Counters) -> None:
    """Diverged: some numbers are not finite."""
    moments = MOMENTS if optimizer is not None and counters.updates else ()
    tensors: dict[str, Tensor] = {}
    stage = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)  # all of its ranks read full tensors
    for number, slot in enumerate(weights.slots):
        for what in ("param", *moments):
            values = [p.detach() if optimizer is None else _trained(optimizer, p, what) for p in slot.parameters]
            full = slot.read(values)
            if not checkpoint.is_finite(full):
                raise checkpoint.not_saved(slot.name if what == "param" else f"{what} of {slot.name}")
            if number % stage.size() == stage.rank() and weights.owns(slot):
                tensors[_stored_name(slot.name, what)] = full.cpu().contiguous()
    steps = dict.fromkeys(weights.shapes, float(counters.updates))
    kind = OPTIMIZER if optimizer is not None else None
    checkpoint.write(path, module, tensors, counters, kind, steps if moments else {})


def load(path: Path, weights: Weights, module: nn.Module, optimizer: Any) -> Counters:
    """UserError: as `engines.checkpoint.load`."""
    state, stored = checkpoint.begin_to_read(path, module, OPTIMIZER if optimizer is not None else None)
    kinds = ("param", *(MOMENTS if any(name.startswith("optimizer.") for name in stored) else ()))
    shapes = {_stored_name(name, what): shape for name, shape in weights.shapes.items() for what in kinds}
    checkpoint.check_fit(path, shapes, stored)
    counters = Counters(**state["counters"])
    # Queries, keys and values, say, are slots of one parameter: they follow each other.
    for _, group in groupby(weights.slots, key=lambda slot: id(slot.parameters[0])):
        slots = list(group)
        wholes = {_stored_name(slot.name, what): torch.empty(slot.flat) for slot in slots for what in kinds}
        checkpoint.read_into(path, wholes, together=False)
        parameters = slots[0].parameters
        values = {what: [torch.zeros(parameter.shape) for parameter in parameters] for what in kinds}
        for slot in slots:
            for what in kinds:
                full = wholes[_stored_name(slot.name, what)]
                if not checkpoint.is_finite(full):
                    raise checkpoint.of_no_use(path, slot.name)
                slot.write(values[what], full)
        for number, parameter in enumerate(parameters):
            read = {what: values[what][number].to(parameter.device) for what in kinds}
            parameter.data.copy_(read["param"])
            if optimizer is not None:
                _set_trained(optimizer, parameter, read, counters.updates)
    return counters


def _stored_name(name: str, what: str) -> str:
    return f"model.{name}" if what == "param" else f"optimizer.{name}.{what}"
