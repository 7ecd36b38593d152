"""How a model is cut for FSDP2: which modules, in which precision, over which ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from valor.config.engine import FSDPConfig
from valor.engines.fsdp.loading import take_weights
from valor.errors import UserError
from valor.models.images import vision_tower
from valor.models.internals import hooks_off, unsplit_classes

MOST_IN_ONE_PART = 2**29  # weights, for which that copy takes 4 GiB


def shard(module: nn.Module, fsdp: FSDPConfig, device: torch.device, mesh: DeviceMesh) -> list[FSDPModule]:
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
        options = {"mp_policy": policy, "reshard_after_forward": reshard, "offload_policy": offload}
        sharded = cast(FSDPModule, fully_shard(part, mesh=mesh, **options))
        if not single:
            # Losses are divided by global denominators, so ranks' gradients add up. A plain sum is what gloo can do.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_reduce_scatter_unused_params(True)  # of an expert that one rank did not use
        return sharded

    exact = list(cast(Any, module).float32_modules()) if hasattr(module, "float32_modules") else []
    layers = [] if single and is_one_part(module, fsdp, device) else transformer_layers(module)
    heads = [wrap(part, torch.float32) for part in exact]
    wrapped_layers = [wrap(layer, computing) for layer in layers]
    return [wrap(module, computing, root=True), *wrapped_layers, *heads]


def is_one_part(module: nn.Module, fsdp: FSDPConfig, device: torch.device) -> bool:
    """Whether one GPU's model is cut into no layers, whose hooks would take the host as long as a small one's kernels
    take the GPU. Gradients then are copied all at once, when no activations are left."""
    weights = sum(p.numel() for p in module.parameters())
    return device.type == "cuda" and not fsdp.offload_policy and weights <= MOST_IN_ONE_PART


def reshards(fsdp: FSDPConfig, device: torch.device) -> bool:
    """Whether memory is saved by what has to be sent: weights are gathered for each use, gradients reduced at once."""
    return device.type != "cpu" if fsdp.reshard_after_forward is None else fsdp.reshard_after_forward


@contextmanager
def gathered(parts: Sequence[FSDPModule]) -> Iterator[None]:
    """All parameters of the sharded modules whole, in the computing dtype; nothing inside gathers or frees them."""
    with ExitStack() as stack:
        for part in parts:
            part.unshard()
            stack.enter_context(hooks_off(cast(nn.Module, part)))  # they would have nothing to do
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
    """The outermost blocks that transformers marks as not to be split. Those of a vision tower stay with the root: a
    rank whose rows have no images does not call them. So do blocks that share weights (Zamba2)."""
    names = unsplit_classes(module)
    tower = vision_tower(module.hf) if hasattr(module, "hf") else None
    apart = set() if tower is None else {id(part) for part in tower.modules()}
    blocks = [part for part in module.modules() if type(part).__name__ in names and part is not module]
    inner = {id(p) for block in blocks for p in block.modules() if p is not block}
    inner |= apart
    outer = {block: {*block.parameters()} for block in blocks if id(block) not in inner}
    blocks_of = Counter(chain.from_iterable(outer.values()))
    return [block for block, weights in outer.items() if weights and all(blocks_of[p] == 1 for p in weights)]


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
