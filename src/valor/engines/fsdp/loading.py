"""One rank reads a model; the others get its structure, and each sharded part's weights when that part is cut.

No rank but the first ever holds more of the weights than its shards and one part.
"""

import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from valor.errors import UserError
from valor.models.internals import name_outputs

logger = logging.getLogger(__name__)


def built_once(build: Callable[[], nn.Module], prepare: Callable[[], Any]) -> nn.Module:
    """What `build` returns, on rank 0; elsewhere the same module with its parameters on the meta device (collective).

    Everything but the parameters' values travels with the structure; `take_weights` brings these. `prepare` runs on the
    other ranks and imports what the model's classes need; a rank where that fails builds the module by itself, with a
    warning. An error of `build` on rank 0 is raised on every rank.
    """
    if dist.get_world_size() == 1:
        return build()
    module: nn.Module | None = None
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            module = build()
            box = [_structure(module)]
        except Exception as error:
            known = isinstance(error, UserError)
            box = [error if known else RuntimeError(f"rank 0 could not build the model: {error!r}")]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    (structure,) = box
    if isinstance(structure, Exception):
        raise structure
    if module is not None:
        return module
    prepare()
    if isinstance(structure, bytes):
        try:
            copy = pickle.loads(structure)
            name_outputs(copy)
            return copy
        except Exception as error:  # its code is not on this node, for one
            structure = error
    logger.warning("this process reads the whole model, as its structure cannot be sent: %s", structure)
    return build()


def take_weights(part: nn.Module, device: torch.device) -> None:
    """Move the parameters of `part` to `device` with the values that rank 0 has (collective).

    Those that are sharded already keep theirs, tied ones stay tied.
    """
    if dist.get_world_size() == 1:
        return
    for parameter in part.parameters():
        if isinstance(parameter, DTensor):
            continue
        value = value_of_rank_0(parameter, device)
        torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))


def value_of_rank_0(parameter: nn.Parameter, device: torch.device) -> Tensor:
    """Its value on `device` (collective)."""
    value = parameter.detach()
    value = (torch.empty_like(value, device=device) if value.is_meta else value.to(device)).contiguous()
    dist.broadcast(value, src=0)
    return value


def _structure(module: nn.Module) -> bytes | str:
    """`module` without its parameters' values, or why its classes cannot be sent."""
    file = io.BytesIO()
    try:
        _StructurePickler(file).dump(module)
    except Exception as error:  # whatever the objects of a model raise that cannot be copied
        return str(error)
    return file.getvalue()


class _StructurePickler(cloudpickle.Pickler):  # transformers hangs local functions on its modules
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Parameter):
            return _without_value, (tuple(obj.shape), obj.dtype, obj.requires_grad)
        return super().reducer_override(obj)


def _without_value(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=requires_grad)
