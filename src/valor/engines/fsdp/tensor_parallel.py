"""Tensor parallelism: neighbouring ranks hold parts of the attention heads and MLP columns, by the model's own plan.

Embeddings, norms and heads are computed whole by every rank of a group, and all of them read the same rows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from valor.errors import UserError
from valor.models.lora import has_adapters

_KEY = "fsdp_config.tensor_parallel_size"

# By transformers' names. The last is of norms of single heads: whole, they see the heads of their rank, [b, n, h, d].
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}

# It warns that gathering a whole tensor takes one collective per dimension of the mesh.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def planned_styles(module: nn.Module, size: int) -> dict[nn.Module, ParallelStyle]:
    """How the layers of `module.hf` are cut into `size` parts; what is not named stays whole.

    UserError: adapters, a model without a plan or with one that cannot be followed, a size that does not divide it.
    """
    hf: Any = module.hf
    base, config, remedy = hf.base_model, hf.config.get_text_config(), f"set {_KEY}=1"
    plan = {k: style for k, style in (base._tp_plan or {}).items() if not style.startswith("embedding")}
    if has_adapters(hf):
        raise UserError(f"{_KEY}={size} does not go with LoRA: set model.lora_rank=0, or {remedy}")
    if not plan:
        raise UserError(f"{_KEY}={size}: transformers has no tensor-parallel plan for {type(hf).__name__}: {remedy}")
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(config, key, None) or size
        if count % size:
            raise UserError(f"{_KEY}={size} does not divide {key}={count} of the model: set it to a number that does")
    names = {part: plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", key)) for key, part in base.named_modules()}
    chosen = {part: style for part, style in names.items() if style is not None}
    unknown = {style for part, style in chosen.items() if style not in _STYLES or not _fits(part, style)}
    forgotten = _forgotten(base, chosen)
    if unknown or forgotten:
        what = (
            f"styles that are not available ({', '.join(sorted(unknown))})" if unknown else f"no rule for {forgotten}"
        )
        raise UserError(f"{_KEY}={size}: transformers' plan for {type(hf).__name__} has {what}: {remedy}")
    return {part: _STYLES[style]() for part, style in chosen.items()}


def parallelize(part: nn.Module, styles: dict[nn.Module, ParallelStyle], mesh: DeviceMesh) -> bool:
    """Cut those layers inside `part` that are in `styles` over `mesh["tp"]`, and take them out; whether there were any.

    A rank keeps a piece of its own copy.
    """
    found = [layer for layer in part.modules() if layer in styles]
    for layer in found:
        trained = {name for name, parameter in layer.named_parameters() if parameter.requires_grad}
        parallelize_module(layer, mesh["tp"], styles.pop(layer), src_data_rank=None)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name in trained)
    return bool(found)


def _fits(part: nn.Module, style: str) -> bool:
    return isinstance(part, nn.Linear) or "wise" not in style


def _forgotten(base: nn.Module, chosen: Mapping[nn.Module, str]) -> str | None:
    """A parameter beside column-wise layers without a style: it would get the gradient of one rank's part alone."""
    planned = {id(p) for part in chosen for p in part.parameters()}
    for key, parent in base.named_modules():
        if "colwise" in (chosen.get(child) for child in parent.children()):
            for name, parameter in parent.named_parameters():
                if id(parameter) not in planned:
                    return f"{key}.{name}"
    return None
