"""Optimizers and learning-rate schedules by the keys of `optim`."""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from valor.config.engine import OptimConfig


def build_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW (its fused kernel) over all trainable parameters; weight decay acts on every one of them."""
    trained = [p for p in parameters if p.requires_grad]
    return torch.optim.AdamW(
        trained, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
    )


def lr_factor(step: int, optim: OptimConfig, total_steps: int) -> float:
    """What multiplies `lr` in schedule step `step` = 0, 1, …, total_steps - 1.

    Warm-up lasts `lr_warmup_steps` steps (-1: `lr_warmup_steps_ratio` of `total_steps`) and uses (step + 1) / warmup:
    no update is spent at rate 0, and the last warm-up step has the full rate. The step after it starts the decay from
    1: `constant` stays; `linear` and `cosine` (half a period) fall to `min_lr_ratio` at `total_steps`. The floor is
    first reached by a step beyond the last.
    """
    warmup = optim.lr_warmup_steps
    if warmup < 0:
        warmup = int(optim.lr_warmup_steps_ratio * max(total_steps, 0))
    if step < warmup:
        return (step + 1) / warmup
    if optim.lr_scheduler_type == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if optim.lr_scheduler_type == "linear":
        left = 1.0 - done
    else:
        left = max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))
    return optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * left


def global_norm(tensors: Sequence[DTensor]) -> float:
    """The 2-norm over all numbers of all shards, the same on every rank."""
    if not tensors:
        return 0.0
    # torch's own norm goes through DTensor dispatch for every tensor and operation.
    norms = [torch.linalg.vector_norm(tensor.to_local(), dtype=torch.float32) for tensor in tensors]
    squares = torch.stack(norms).double().square()
    if (world := dist.get_world_size()) == 1:
        return float(squares.sum().sqrt())
    shares = [_num_shards(tensor) / world for tensor in tensors]
    square = (squares * torch.tensor(shares, dtype=torch.float64, device=squares.device)).sum()
    dist.all_reduce(square)
    return float(square.sqrt())


def _num_shards(tensor: DTensor) -> int:
    """Into how many parts it is cut; each is on as many ranks as there are ranks to a part."""
    mesh, placements = tensor.device_mesh, tensor.placements
    return math.prod(mesh.size(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())
