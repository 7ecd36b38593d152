"""How a model is cut for FSDP2: which modules, in which precision, over which ranks; and what of torch's FSDP2 is
needed beyond its public interface.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from valor.config.engine import FSDPConfig
from valor.engines.fsdp.loading import take_weights
from valor.errors import UserError


def shard(
    module: nn.Module, fsdp: FSDPConfig, device: torch.device, mesh: DeviceMesh, reductions: ReduceBehind | None
) -> list[FSDPModule]:
    """Apply FSDP2 in place, layer by layer and then the root; returns the sharded modules as a forward enters them.

    Over the `rank_mesh` of the same `fsdp`. The weights are those of rank 0. Parameters keep their dtype as master
    weights, are gathered and computed with in `fsdp.dtype`, and their gradients are summed over ranks in float32.
    Modules named by the model's `float32_modules()` are computed in float32. Frozen and trainable parameters may share
    a layer; the trainable ones have one dtype there.
    """
    single = mesh.size() == 1
    computing = getattr(torch, fsdp.dtype)
    offload = CPUOffloadPolicy() if fsdp.offload_policy and device.type == "cuda" else OffloadPolicy()

    def wrap(part: nn.Module, dtype: torch.dtype, *, root: bool = False) -> FSDPModule:
        take_weights(part, device)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        # With one rank there is nothing to gather, so a layer's computing copy stays until the step's work is done.
        reshard = False if single or root else reshards(fsdp, device)
        kept = {"mp_policy": policy, "reshard_after_forward": reshard, "offload_policy": offload}
        sharded = cast(FSDPModule, fully_shard(part, mesh=mesh, **kept))
        if single:
            sharded.set_custom_reduce_scatter(ReduceInPlace())  # type: ignore[arg-type]
        else:
            # Losses are divided by global denominators, so ranks' gradients add up. A plain sum is what gloo can do.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_reduce_scatter_unused_params(True)  # of an expert that one rank did not use
            if reductions is not None:
                sharded.set_custom_reduce_scatter(reductions)  # type: ignore[arg-type]
        return sharded

    exact = list(cast(Any, module).float32_modules()) if hasattr(module, "float32_modules") else []
    layers = transformer_layers(module)
    heads = [wrap(part, torch.float32) for part in exact]
    wrapped_layers = [wrap(layer, computing) for layer in layers]
    return [wrap(module, computing, root=True), *wrapped_layers, *heads]


def reshards(fsdp: FSDPConfig, device: torch.device) -> bool:
    """Whether memory is saved by what has to be sent: weights are gathered for each use, gradients reduced at once."""
    return device.type != "cpu" if fsdp.reshard_after_forward is None else fsdp.reshard_after_forward


@contextmanager
def gathered(parts: Sequence[FSDPModule]) -> Iterator[None]:
    """All parameters of the sharded modules whole, in the computing dtype; nothing inside gathers or frees them."""
    with ExitStack() as stack:
        for part in parts:
            part.unshard()
            # FSDP's hooks have nothing to do here and cost a fifth of a decoding step of a small model.
            stack.enter_context(hooks_off(part))
        try:
            yield
        finally:
            stack.close()
            for part in parts:
                part.reshard()


def rank_mesh(device: torch.device, fsdp: FSDPConfig) -> DeviceMesh:
    """How ranks divide the work: `shard` over all, or over groups of `fsdp_size` that hold copies of each other
    (`replicate`). UserError: a size that does not divide the ranks.
    """
    world, shards = dist.get_world_size(), fsdp.fsdp_size
    shards = world if shards < 0 else min(shards, world)
    if shards == 0 or world % shards:
        raise UserError(f"fsdp_config.fsdp_size={shards} does not divide the {world} ranks")
    dims = {"replicate": world // shards, "shard": shards}
    dims = {name: n for name, n in dims.items() if n > 1 or name == "shard"}
    return init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))


def transformer_layers(module: nn.Module) -> list[nn.Module]:
    """The outermost blocks that transformers marks as not to be split."""
    names: set[str] = set()
    for part in module.modules():
        names |= set(getattr(part, "_no_split_modules", None) or ())
    found = [part for part in module.modules() if type(part).__name__ in names and part is not module]
    inner = {id(p) for part in found for p in part.modules() if p is not part}
    return [part for part in found if id(part) not in inner and any(True for _ in part.parameters())]


def sequence_group(module: nn.Module, size: int) -> dist.ProcessGroup:
    """This rank's group of `size` neighbours, each of which computes a part of every row (Ulysses).

    UserError: a number that does not divide the ranks or the heads, or a model that cannot read packed rows.
    """
    world, model, key = dist.get_world_size(), cast(Any, module), "ulysses_sequence_parallel_size"
    if not getattr(model, "packed", False):
        raise UserError(
            f"{key}={size} shares packed rows out: leave model.use_remove_padding at true; a model that cannot "
            f"read them (a warning has said so of {type(model.hf).__name__}) needs {key}=1"
        )
    heads = model.hf.config.get_text_config().num_attention_heads
    for what, count in (("attention heads of the model", heads), ("processes", world)):
        if count % size:
            raise UserError(f"{key}={size} does not divide the {count} {what}: set it to a number that does")
    groups: list[Any] = [dist.new_group(list(range(start, start + size))) for start in range(0, world, size)]
    return groups[dist.get_rank() // size]


def drop_unreduced_gradients(part: FSDPModule) -> None:
    """Forget the gradients of whole parameters, which a backward pass left before they were reduced."""
    group = part._get_fsdp_state()._fsdp_param_group
    for held in group.fsdp_params if group else ():
        held.unsharded_accumulated_grad = None
        if hasattr(held, "_unsharded_param"):
            held._unsharded_param.grad = None


@contextmanager
def hooks_off(part: FSDPModule) -> Iterator[None]:
    """No hooks around the forward pass of `part` inside."""
    module = cast(nn.Module, part)
    before, after = module._forward_pre_hooks, module._forward_hooks
    module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        module._forward_pre_hooks, module._forward_hooks = before, after


class ReduceBehind:
    """FSDP's reduce-scatter on CPUs, behind the backward pass; `finish` waits for what is under way.

    FSDP waits for each there, and so every layer for the slowest process. Nobody asks for a result before `finish` if
    parameters are float32, of whose gradients it then is the memory, and have no gradients yet: else set `at_once`.
    """

    def __init__(self) -> None:
        self.at_once = False
        self._under_way: list[Any] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._under_way = [work for work in self._under_way if not work.is_completed()]  # which frees its input
        self._under_way.append(dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op=True))
        if self.at_once:
            self.finish()

    def finish(self) -> None:
        while self._under_way:
            self._under_way.pop(0).wait()


class ReduceInPlace:
    """FSDP's reduce-scatter for a group of one: the buffer that it fills with gradients is also the result.

    FSDP asks for an input, fills it, asks for an output of the same size and copies; with one tensor for both the copy
    does nothing, which saves a pass over all gradients and their memory.
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        given, self._input = self._input, None
        if given is not None and tuple(given.shape) == tuple(size) and given.dtype == dtype:
            return given
        self._input = torch.empty(*size, dtype=dtype, device=device)
        return self._input

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(input_tensor)
