"""Who computes what: megatron-core's process groups by the sizes under `megatron`, and what they must divide."""

# pyright: reportMissingImports=false

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random

from valor.config.engine import MegatronConfig
from valor.errors import UserError

mpu: Any = parallel_state  # whose functions say that they may return None, or a number
_made: tuple[Any, tuple[int | None, ...]] = (None, ())  # the process group and the sizes of the groups there are


def make_groups(config: MegatronConfig, device: torch.device) -> None:
    """megatron-core's groups of this process (collective). They are one set for all of its roles.

    UserError: no GPU, sizes that the processes do not fit, or other sizes than those of an earlier role.
    """
    global _made
    if device.type == "cpu" and not _poses_as_gpu():
        raise UserError("strategy=megatron needs a GPU, as megatron-core allocates on nothing else: use strategy=fsdp2")
    world, sizes = dist.get_world_size(), config.sizes
    share = sizes["tensor"] * sizes["pipeline"] * sizes["context"]
    experts = (config.expert_tensor_parallel_size or sizes["tensor"]) * sizes["expert"] * sizes["pipeline"]
    for what, product in (("tensor, pipeline and context", share), ("expert, expert tensor and pipeline", experts)):
        if world % product:
            raise UserError(
                f"megatron: the {what} parallel sizes make {product}, which does not divide {world} processes"
            )
    wanted = (*sizes.values(), config.expert_tensor_parallel_size)
    if _made[0] is dist.group.WORLD and mpu.is_initialized():
        if _made[1] == wanted:
            return
        raise UserError("roles in the same processes share megatron's parallel sizes: set them alike for all of them")
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=sizes["tensor"],
        pipeline_model_parallel_size=sizes["pipeline"],
        context_parallel_size=sizes["context"],
        expert_model_parallel_size=sizes["expert"],
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    random.model_parallel_cuda_manual_seed(0, force_reset_rng=True)  # nothing is ever drawn
    _made = (dist.group.WORLD, wanted)


def _poses_as_gpu() -> bool:
    try:
        return torch.cuda.current_device() is not None
    except (AssertionError, RuntimeError):
        return False
